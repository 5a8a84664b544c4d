"""Admission and eviction: which ids of a table have a row after a further day of data.

An id that is not admitted yet waits with its count. Ids are evicted by the day of their last event,
then by their count. Every function of this module is exact and does not depend on the order of the
data.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from jaxrank.data.statistics.vocabulary import (
    WITH_DAYS,
    Counter,
    Vocabulary,
    checksum,
    counts_checksum,
)

# Day of an event without a time. The event counts, but its id was not seen on any day.
NO_DAY = -(2**31)

# Key of `TableHistory.counted` for the preparations of a store that did not count by day yet.
_PREPARATIONS = NO_DAY + 1

_MAX_COUNTED_DAYS = 10_000  # days that a store remembers as counted


class Limits(NamedTuple):
    """The settings of a table, see `CategoricalSpec`. 0: no limit of rows or days."""

    min_count: int = 1
    max_rows: int = 0
    keep_days: int = 0
    max_waiting: int = 0


class TableHistory(NamedTuple):
    """State of a table beside its vocabulary, from which a later day continues.

    last_days: i32[values of the vocabulary], the day of each value's last event.
    waiting: columns value, count, last_day of ids without a row, by value.
    counted: {day: checksums of the counts that were added for it}.
    newest: the newest day of an event.
    by_event: True: days of events since 1970. False: numbers of preparations, for data without
        times.
    """

    last_days: np.ndarray
    waiting: pa.Table
    counted: dict[int, list[str]]
    newest: int
    by_event: bool

    def to_state(self) -> dict[str, Any]:
        """Returns the entry of a table in the manifest, with checksums of the arrays."""
        return {
            "last_days": counts_checksum(self.last_days),
            "waiting": waiting_checksum(self.waiting),
            "newest": self.newest,
            "by_event": self.by_event,
            "counted": {str(day): sums for day, sums in self.counted.items()},
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], last_days: np.ndarray, waiting: pa.Table
    ) -> "TableHistory":
        """Reads an entry of the manifest. The checksums are not compared with the arrays."""
        counted = {int(day): list(sums) for day, sums in state["counted"].items()}
        return cls(last_days, waiting, counted, state["newest"], state["by_event"])


class Changes(NamedTuple):
    """Numbers of ids after a day: rows that are kept, new and evicted, and ids that wait.

    dropped: ids that no longer wait, because there are more than `max_waiting`.
    lookups: ids in the training split of this preparation.
    lost: those of them that have no row.
    """

    kept: int
    new: int
    evicted: int
    waiting: int
    dropped: int
    lookups: int
    lost: int

    @property
    def lost_share(self) -> float:
        return self.lost / max(self.lookups, 1)

    def to_state(self) -> dict[str, Any]:
        """Returns the entry of a table in the manifest."""
        return {**self._asdict(), "lost_share": self.lost_share}


class Admitted(NamedTuple):
    """The vocabulary of a table after a further day."""

    vocabulary: Vocabulary
    history: TableHistory
    changes: Changes


def admit(
    counters: Mapping[int, Counter],
    limits: Limits,
    *,
    newest: int,
    by_event: bool,
    earlier: Vocabulary | None = None,
    history: TableHistory | None = None,
) -> Admitted:
    """Returns the vocabulary after the counts of some days are added to that of an earlier store.

    Counts that the earlier store has already added for a day are left out, and those without a day
    if it has added them together with the same days. Where it counted preparations and days are
    counted now, counts that equal those of a preparation are left out, whether they are of one day
    or of all. If none are left, the earlier vocabulary and history stay as they are. Otherwise
    these rules hold for all ids that have a row, wait or occur:

    1. An id whose last event is `keep_days` or more before the newest day is forgotten.
    2. Ids with a row, and ids with `min_count` occurrences over all days, may have one. If there
       are more than `max_rows`, those with the latest last day have it. Within a day these are the
       most frequent ones, then those that had a row, then the first in order of values. Without an
       earlier store, the most frequent ones have a row whatever their day.
    3. Earlier values keep their order, and new ones follow by falling count, then by value.
    4. The other ids wait, at most `max_waiting` of them, chosen as in 2.

    Args:
        counters: of the ids of each day. Without `by_event` there is one.
        newest: the newest day of any event, or NO_DAY.
        by_event: see `TableHistory`. Without it a preparation counts as a day.
        earlier: the vocabulary of the earlier store.
        history: of the earlier store. None: its version did not record one, and its ids were last
            seen on the day before the first event.
    """
    seen = {day: counter.counts() for day, counter in counters.items()}
    occurring = _grouped(seen)
    is_first = earlier is None
    if earlier is None:
        earlier, history = Vocabulary(pa.array([], pa.string()), np.zeros(0, np.int64)), None
    unchanged = history
    if history is None or history.by_event != by_event:
        history = _unrecorded(earlier, history, seen, by_event)
    if not by_event:
        # A further preparation is the next day.
        newest = history.newest + 1
        seen = dict.fromkeys([newest], next(iter(seen.values()))) if seen else {}
    sums = _checksums(seen)
    before = {s for listed in history.counted.values() for s in listed}
    of_preparations = history.counted.get(_PREPARATIONS, [])
    added = {
        day: digest
        for day, digest in sums.items()
        if digest not in ([*history.counted.get(day, []), *of_preparations] if by_event else before)
    }
    if of_preparations and _checksum(occurring) in of_preparations:
        added = {}
    # Earlier versions recorded a checksum of the counts without a day that depends on no other day.
    if by_event and set(added) == {NO_DAY}:
        is_counted = _checksum(seen[NO_DAY]) in history.counted.get(NO_DAY, [])
        added = {} if is_counted else added
    if added or is_first:
        known = _Known(earlier, history, _grouped({day: seen[day] for day in added}))
        newest = max(newest, history.newest)
        admitted = known.admitted(limits, newest, is_first)
        admitted = admitted._replace(
            history=admitted.history._replace(
                counted=_add_days(history.counted, added), newest=newest, by_event=by_event
            )
        )
    else:
        stays = Changes(len(earlier.values), 0, 0, len(history.waiting), 0, 0, 0)
        admitted = Admitted(earlier, unchanged or history, stays)
    return admitted._replace(changes=_count_lookups(admitted, occurring))


def _count_lookups(admitted: Admitted, occurring: pa.Table) -> Changes:
    """Counts the ids of the training split, and how many of them have no row."""
    lookups = int(pc.sum(occurring["count"]).as_py() or 0)
    has_row = pc.is_in(occurring["value"], value_set=admitted.vocabulary.values)
    read = int(pc.sum(occurring["count"].filter(has_row)).as_py() or 0)
    return admitted.changes._replace(lookups=lookups, lost=lookups - read)


def extended_days(before: TableHistory, after: TableHistory) -> list[int]:
    """Returns the days that had counts before and to which other counts were added."""
    return [
        day
        for day, sums in after.counted.items()
        if after.by_event
        and day > _PREPARATIONS
        and 0 < len(before.counted.get(day, [])) < len(sums)
    ]


def waiting_checksum(waiting: pa.Table) -> str:
    """Returns a checksum of all columns."""
    parts = [checksum(waiting["value"])]
    parts += [counts_checksum(waiting[name].to_numpy()) for name in ("count", "last_day")]
    return xxhash.xxh3_64_hexdigest(" ".join(parts).encode())


def _unrecorded(
    earlier: Vocabulary, history: TableHistory | None, seen: Mapping[int, pa.Table], by_event: bool
) -> TableHistory:
    """Returns a history of ids that were all last seen on the day before the first event.

    It keeps the checksums of preparations.
    """
    days = [day for day in seen if day != NO_DAY]
    before = (min(days) - 1 if days else NO_DAY) if by_event else -1
    waiting = history.waiting if history else WITH_DAYS.empty_table()
    last_day = pa.array(np.full(len(waiting), before, np.int32))
    sums = [s for listed in history.counted.values() for s in listed] if history else []
    return TableHistory(
        last_days=np.full(len(earlier.values), before, np.int32),
        waiting=waiting.set_column(2, WITH_DAYS.field(2), last_day),
        counted={_PREPARATIONS: sums} if sums else {},
        newest=before,
        by_event=by_event,
    )


def _grouped(seen: Mapping[int, pa.Table]) -> pa.Table:
    """Returns columns value, count and last_day over days, each value once."""
    parts = [
        pa.table(
            [counts["value"], counts["count"], pa.array(np.full(len(counts), day, np.int32))],
            schema=WITH_DAYS,
        )
        for day, counts in seen.items()
    ]
    if not parts:
        return WITH_DAYS.empty_table()
    grouped = pa.concat_tables(parts).group_by("value", use_threads=False)
    summed = grouped.aggregate([("count", "sum"), ("last_day", "max")])
    names = {"count_sum": "count", "last_day_max": "last_day"}
    renamed = summed.rename_columns([names.get(n, n) for n in summed.column_names])
    return renamed.select(WITH_DAYS.names).cast(WITH_DAYS)


def _checksums(seen: Mapping[int, pa.Table]) -> dict[int, str]:
    """Returns a checksum of the counts of each day that has ids.

    The one of events without a time also depends on the days that were prepared with them, which
    tell them from the events without a time of another day.
    """
    sums = {day: _checksum(counts) for day, counts in seen.items() if len(counts)}
    if NO_DAY in sums and len(sums) > 1:
        text = " ".join(f"{day} {sums[day]}" for day in sorted(sums))
        sums[NO_DAY] = xxhash.xxh3_64_hexdigest(text.encode())
    return sums


def _checksum(counts: pa.Table) -> str:
    """Returns a checksum of values and counts, in any order."""
    ordered = counts.sort_by("value")
    parts = [checksum(ordered["value"]), counts_checksum(ordered["count"].to_numpy())]
    return xxhash.xxh3_64_hexdigest(" ".join(parts).encode())


def _add_days(counted: Mapping[int, list[str]], added: Mapping[int, str]) -> dict[int, list[str]]:
    """Adds the checksums of each day, and leaves out the oldest days where there are many."""
    days = sorted({*counted, *added})[-_MAX_COUNTED_DAYS:]
    return {day: [*counted.get(day, []), *([added[day]] if day in added else [])] for day in days}


class _Known:
    """All ids that have a row, wait or occur: values, counts i64[ids] and last days i32[ids].

    Those with a row are first, in order of rows.
    """

    def __init__(self, earlier: Vocabulary, history: TableHistory, seen: pa.Table):
        waiting = history.waiting
        before = pa.chunked_array([earlier.values, *waiting["value"].chunks])
        before = before.cast(pa.string())
        at = pc.index_in(seen["value"], value_set=before)
        is_new = pc.is_null(at)
        new = seen.filter(is_new)
        again, place = seen.filter(pc.invert(is_new)), at.drop_null().to_numpy()
        counts = np.concatenate([earlier.counts, waiting["count"].to_numpy()]).astype(np.int64)
        last = np.concatenate([history.last_days, waiting["last_day"].to_numpy()]).astype(np.int32)
        counts[place] += again["count"].to_numpy()
        last[place] = np.maximum(last[place], again["last_day"].to_numpy())
        self.rows = len(earlier.values)
        self.values = pa.concat_arrays([*before.chunks, *new["value"].chunks])
        self.counts = np.concatenate([counts, new["count"].to_numpy()])
        self.last = np.concatenate([last, new["last_day"].to_numpy()])

    def admitted(self, limits: Limits, newest: int, is_first: bool) -> Admitted:
        """Applies the rules of `admit`. The history has no `counted` yet."""
        alive = np.ones(len(self.values), bool)
        if limits.keep_days:
            alive = self.last > newest - limits.keep_days
        has_row = np.arange(len(self.values)) < self.rows
        may = np.flatnonzero(alive & (has_row | (self.counts >= limits.min_count)))
        chosen = may
        if limits.max_rows and len(may) > limits.max_rows:
            chosen = np.sort(self._first(may, limits.max_rows, by_day=not is_first))
        kept = chosen[chosen < self.rows]
        new = chosen[chosen >= self.rows]
        rows = np.concatenate([kept, self._first(new, len(new), by_day=False)])
        waits = alive.copy()
        waits[rows] = False
        waiting = np.flatnonzero(waits)
        count = len(waiting)
        if count > limits.max_waiting:
            waiting = self._first(waiting, limits.max_waiting, by_day=True)
        changes = Changes(
            kept=len(kept),
            new=len(new),
            evicted=self.rows - len(kept),
            waiting=len(waiting),
            dropped=count - len(waiting),
            lookups=0,
            lost=0,
        )
        vocabulary = Vocabulary(self.values.take(pa.array(rows)), self.counts[rows])
        by_value = self._table(waiting).sort_by("value")
        history = TableHistory(self.last[rows], by_value, {}, newest, True)
        return Admitted(vocabulary, history, changes)

    def _first(self, ids: np.ndarray, count: int, *, by_day: bool) -> np.ndarray:
        """Returns the first `count` of some ids: by falling last day if `by_day`, then by falling
        count, then those with a row, then by value.
        """
        table = self._table(ids).append_column("is_new", pa.array((ids >= self.rows).astype("i1")))
        keys = [("last_day", "descending")] if by_day else []
        keys += [("count", "descending"), ("is_new", "ascending"), ("value", "ascending")]
        return ids[pc.sort_indices(table, keys).to_numpy()[:count]]

    def _table(self, ids: np.ndarray) -> pa.Table:
        columns = [self.values.take(pa.array(ids)), self.counts[ids], self.last[ids]]
        return pa.table(columns, schema=WITH_DAYS)
