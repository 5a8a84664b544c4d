"""Measures which phase of a run the time goes to."""

import contextlib
import threading
import time
from collections.abc import Iterator

from jax import monitoring

PHASES = ("preparation", "compilation", "training", "evaluation", "saving")
# Durations that JAX and `jaxrank.native` report: tracing, lowering, XLA and C++.
_COMPILATION = ("/jax/core/compile/", "/jaxrank/compile/")


class PhaseTimer:
    """Assigns each second to one phase. The first phase is "preparation".

    Time in which the thread that made the timer traces or compiles a program belongs to
    "compilation" in every phase. So does loading a program from the compilation cache.

    began: when the timer was made, by `time.perf_counter`.

        with PhaseTimer() as timer:
            timer.enter("training")
            with timer.phase("saving"):
                ...
            timer.seconds()
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self.started = time.perf_counter()
        self._phase, self._since = PHASES[0], self.started
        # Disjoint (start, end) of compilation since `_since`, in order.
        self._compiled: list[tuple[float, float]] = []
        self._thread = threading.get_ident()

    def __enter__(self) -> "PhaseTimer":
        monitoring.register_event_duration_secs_listener(self._add_event)
        return self

    def __exit__(self, *_: object) -> None:
        monitoring.unregister_event_duration_listener(self._add_event)

    def enter(self, phase: str) -> None:
        """Ends the current phase and starts another."""
        now = time.perf_counter()
        compiled = sum(end - start for start, end in self._compiled)
        self._compiled.clear()
        self._seconds["compilation"] += compiled
        self._seconds[self._phase] += now - self._since - compiled
        self._phase, self._since = phase, now

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Enters a phase and returns to the current one at the end."""
        outer = self._phase
        self.enter(name)
        try:
            yield
        finally:
            self.enter(outer)

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each phase up to now. Their sum is the time since the start."""
        self.enter(self._phase)
        return dict(self._seconds)

    def _add_event(self, event: str, duration_secs: float, **_: str | int) -> None:
        if not event.startswith(_COMPILATION) or threading.get_ident() != self._thread:
            return
        end = time.perf_counter()
        start = max(end - duration_secs, self._since)
        # An event contains the events of the programs that it calls, which ended earlier.
        before = [(s, min(e, start)) for s, e in self._compiled if s < start]
        self._compiled = [*before, (start, end)]
