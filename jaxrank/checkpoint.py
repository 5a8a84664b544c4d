"""Checkpoints: the state, where the run stands in its data, and what it has seen so far.

    WORKDIR/checkpoints/<step>/weights    what predicts: parameters, model state, table rows
    WORKDIR/checkpoints/<step>/training   what else training needs: optimizer states, rate factor,
                                          and the weights themselves where an average predicts
    WORKDIR/checkpoints/<step>/run        JSON: position in the data, monitor, versions
    WORKDIR/checkpoints/<step>/metrics    JSON: {"metric": the monitored metric}, if evaluated

Tables are stored in an order that does not depend on the devices; see `embedding.storage`.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import absl.logging
import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

import jaxrank
from jaxrank import processes
from jaxrank.errors import InputError, RunError
from jaxrank.step import TrainState, Weights, trained, weights_of

# About twenty lines a save otherwise; and of one that fails a page of traceback for each array, as
# late as the end of the process. The exception itself is raised where the save is waited for.
absl.logging.set_verbosity(absl.logging.FATAL)
logging.getLogger("asyncio").setLevel(logging.CRITICAL)


def _unraisable(
    found: "sys.UnraisableHookArgs",
    told: Callable[["sys.UnraisableHookArgs"], object] = sys.unraisablehook,
) -> None:
    # TensorStore's threads, each, once the save has failed and its event loop has ended.
    if str(found.exc_value) != "Event loop is closed":
        told(found)


sys.unraisablehook = _unraisable


class _Training(NamedTuple):
    """The part of TrainState that is not in `weights_of`. Scratch arrays are not saved.

    trained: the weights to go on from, where those that predict are their average; or {}.
    """

    step: Any
    opt_state: Any
    slots: dict[str, dict[str, Any]]
    rate_factor: Any
    trained: Any


def _training_of(state: TrainState) -> _Training:
    slots = {name: table.slots for name, table in state.tables.items()}
    weights = trained(state) if state.average else {}
    return _Training(state.step, state.opt_state, slots, state.rate_factor, weights)


def _joined(state: TrainState, predicts: Weights, training: _Training) -> TrainState:
    weights = training.trained or predicts
    tables = {
        name: table._replace(rows=weights.rows[name], slots=training.slots[name])
        for name, table in state.tables.items()
    }
    return state._replace(
        step=training.step,
        params=weights.params,
        model_state=weights.model_state,
        opt_state=training.opt_state,
        tables=tables,
        rate_factor=training.rate_factor,
        average=predicts if training.trained else {},
    )


def _placed(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )


class Checkpoints:
    """The checkpoints of one run.

    Args:
        workdir: of the run.
        keep: how many of the newest to keep; the best one is kept beside them.
        higher_is_better: of the monitored metric.
        read_only: for evaluation; nothing is created or deleted.
    """

    def __init__(
        self,
        workdir: str | Path,
        *,
        keep: int = 2,
        higher_is_better: bool = False,
        read_only: bool = False,
    ):
        self.path = Path(workdir).absolute() / "checkpoints"
        if read_only and not self.path.is_dir():
            raise InputError(f"{workdir}: holds no checkpoints. Is it the workdir of a run?")
        self._higher_is_better = higher_is_better
        policies = [checkpoint_managers.LatestN(max(1, keep)), self._best_policy()]
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            # Orbax writes metrics only where it has a best_fn; the policies decide what is kept.
            best_fn=lambda metrics: metrics["metric"],
            best_mode="max" if higher_is_better else "min",
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
        )
        self._manager = ocp.CheckpointManager(self.path, options=options)

    def _best_policy(self) -> checkpoint_managers.BestN:
        # A checkpoint without the metric is never the best one; LatestN alone keeps it.
        return checkpoint_managers.BestN(
            get_metric_fn=lambda m: m["metric"],
            reverse=not self._higher_is_better,
            n=1,
            keep_checkpoints_without_metrics=False,
        )

    def step(self, which: str | int = "newest") -> int | None:
        """The step of the newest or best checkpoint, or None if there is none.

        Process 0 says, for a run that goes on beside this one may just save another.

        Raises:
            InputError: a step was named that has no checkpoint.
        """
        found = None
        with processes.together():
            if processes.is_first():
                found = self._find(which)
        return processes.from_first(found)

    def _find(self, which: str | int) -> int | None:
        steps = sorted(self._manager.all_steps())
        if which == "newest":
            return steps[-1] if steps else None
        if which == "best":
            measured = [(s, self._metric(s)) for s in steps]
            scored = [(m, s) for s, m in measured if m is not None]
            if not scored:
                return self._find("newest")
            best = (max if self._higher_is_better else min)(m for m, _ in scored)
            return min(s for m, s in scored if m == best)
        if str(which).isdecimal() and int(which) in steps:
            return int(which)
        raise InputError(
            f"{self.path}: checkpoint must be newest, best or one of the steps {steps}:"
            f" found {which!r}."
        )

    def _metric(self, step: int) -> float | None:
        metrics = self._manager.metrics(step)
        return None if metrics is None else metrics["metric"]

    def save(self, step: int, state: TrainState, run: dict[str, Any], metric: float | None) -> None:
        """Saves in the background; what was saved before stays until this one is whole.

        Raises:
            RunError: this or the save before it could not be written.
        """
        with self._told_as_run_error():
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    weights=ocp.args.StandardSave(weights_of(state)),
                    training=ocp.args.StandardSave(_training_of(state)),
                    run=ocp.args.JsonSave(run | {"jaxrank_version": jaxrank.__version__}),
                ),
                metrics=None if metric is None else {"metric": metric},
                force=True,
            )

    def restore(
        self, step: int, state: TrainState, shapes: TrainState, shardings: TrainState
    ) -> tuple[TrainState, dict[str, Any]]:
        """The state at `step`, placed as `shardings`, with the scratch arrays of `state`.

        Raises:
            InputError: it cannot be read, or is that of another model.
        """
        found = self._restored(
            step,
            ocp.args.Composite(
                weights=ocp.args.StandardRestore(
                    _placed(weights_of(shapes), weights_of(shardings))
                ),
                training=ocp.args.StandardRestore(
                    _placed(_training_of(shapes), _training_of(shardings))
                ),
                run=ocp.args.JsonRestore(),
            ),
        )
        return _joined(state, found["weights"], found["training"]), found["run"]

    def restore_weights(self, step: int, shapes: Weights, shardings: Weights) -> Weights:
        """What predicts, at `step`.

        Raises:
            InputError: as `restore`.
        """
        args = ocp.args.Composite(weights=ocp.args.StandardRestore(_placed(shapes, shardings)))
        return self._restored(step, args)["weights"]

    def _restored(self, step: int, args: ocp.args.Composite) -> Any:
        try:
            return self._manager.restore(step, args=args)
        except Exception as error:  # Orbax raises many kinds for damage and for other shapes
            text = " ".join(str(error).split())[:500]
            raise InputError(
                f"{self.directory(step)}: this checkpoint cannot be restored; it is damaged, or"
                f" that of another model or optimizer than the config's: {text}"
            ) from error

    def wait(self) -> None:
        """Returns when the save in progress, if any, is on disk.

        Raises:
            RunError: it could not be written.
        """
        with self._told_as_run_error():
            self._manager.wait_until_finished()

    @contextlib.contextmanager
    def _told_as_run_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax and TensorStore raise many kinds for a full disk
            raise RunError(
                f"{self.path}: a checkpoint could not be written, those before it are untouched:"
                f" {str(error).splitlines()[0]}"
            ) from error

    def directory(self, step: int) -> str:
        return str(self.path / str(step))

    def close(self) -> None:
        with contextlib.suppress(Exception):  # told by `wait` before, where it matters
            self._manager.close()
