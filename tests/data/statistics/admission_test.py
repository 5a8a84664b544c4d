"""Ids that have a row after further days equal those found with dictionaries and sorting."""

import collections

import numpy as np
import pyarrow as pa
import pytest

from jaxrank.data.statistics import admission
from jaxrank.data.statistics.admission import NO_DAY, Limits, admit
from jaxrank.data.statistics.vocabulary import Counter


def counters(events, parts=1):
    """Counts events (day, value) in a number of parts that are merged backwards."""
    by_day = collections.defaultdict(list)
    for i, (day, value) in enumerate(events):
        by_day[day].append((i % parts, value))
    result = {}
    for day, placed in by_day.items():
        result[day] = Counter()
        for part in reversed(range(parts)):
            values = [value for number, value in placed if number == part]
            result[day].add(pa.array(values, pa.string()))
    return result


class Plain:
    """The rules of `admit` with dictionaries, for days that are counted once."""

    def __init__(self, limits):
        self.limits, self.rows = limits, []
        self.counts, self.last, self.newest = collections.Counter(), {}, NO_DAY

    def add(self, events):
        limits, first = self.limits, not self.counts
        self.newest = max([self.newest, *(day for day, _ in events)])
        for day, value in events:
            self.counts[value] += 1
            self.last[value] = max(day, self.last.get(value, NO_DAY))
        if limits.keep_days:
            for value in list(self.counts):
                if self.newest - self.last[value] >= limits.keep_days:
                    del self.counts[value], self.last[value]
        may = [v for v in self.counts if v in self.rows or self.counts[v] >= limits.min_count]
        may.sort(key=lambda v: (0 if first else -self.last[v], *self._rank(v)))
        chosen = may[: limits.max_rows or None]
        kept = [v for v in self.rows if v in chosen]
        new = sorted(set(chosen) - set(kept), key=lambda v: (-self.counts[v], v))
        evicted = len(self.rows) - len(kept)
        waiting = set(self.counts) - {*kept, *new}
        waiting = sorted(waiting, key=lambda v: (-self.last[v], *self._rank(v)))
        self.rows = kept + new
        for value in waiting[limits.max_waiting :]:
            del self.counts[value], self.last[value]
        lost = sum(value not in self.rows for _, value in events)
        waiting = sorted(waiting[: limits.max_waiting])
        return waiting, (len(kept), len(new), evicted, len(waiting)), (len(events), lost)

    def _rank(self, value):
        return -self.counts[value], value not in self.rows, value


def chain(days, limits, parts=1, by_event=True):
    vocabulary = history = None
    for events in days:
        newest = max((day for day, _ in events), default=NO_DAY)
        result = admit(
            counters(events, parts), limits, newest=newest, by_event=by_event,
            earlier=vocabulary, history=history,
        )  # fmt: skip
        vocabulary, history, changes = result
        yield vocabulary, history, changes


def plain_state(vocabulary, history):
    columns = history.waiting.to_pydict()
    return (
        vocabulary.values.to_pylist(), vocabulary.counts.tolist(), history.last_days.tolist(),
        columns["value"], columns["count"], columns["last_day"], history.newest, history.counted,
    )  # fmt: skip


LIMITS = [
    Limits(1, 0, 0, 1000),
    Limits(3, 0, 0, 1000),
    Limits(1, 12, 0, 1000),
    Limits(2, 12, 3, 1000),
    Limits(3, 10, 2, 7),
    Limits(2, 0, 2, 0),
]


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_and_waiting_ids_are_those_of_plain_python(limits, seed):
    """New ids, ids that disappear, a day in two parts, a day without ids, and a late day."""
    random = np.random.default_rng(seed)
    days = []
    for day in (20, 21, 22, 22, 23, 18, 26, 27):
        ids = day * 4 + random.geometric(0.08, 0 if day == 23 else 60)
        late = day - random.integers(0, 2, len(ids))
        days.append([(int(d), f"v{i}") for d, i in zip(late, ids, strict=True)])
    plain, evicted = Plain(limits), 0
    for events, once, again in zip(days, chain(days, limits), chain(days, limits, 3), strict=True):
        vocabulary, history, changes = once
        waiting, numbers, lookups = plain.add(events)
        assert vocabulary.values.to_pylist() == plain.rows
        assert vocabulary.counts.tolist() == [plain.counts[v] for v in plain.rows]
        assert history.last_days.tolist() == [plain.last[v] for v in plain.rows]
        result = history.waiting.to_pydict()
        assert result["value"] == waiting
        assert result["count"] == [plain.counts[v] for v in waiting]
        assert result["last_day"] == [plain.last[v] for v in waiting]
        assert (*changes[:4], *changes[5:]) == (*numbers, *lookups)
        assert plain_state(*again[:2]) == plain_state(vocabulary, history)
        evicted += changes.evicted
    assert (evicted > 0) == bool(limits.max_rows or limits.keep_days)


@pytest.mark.parametrize("by_event", [True, False])
@pytest.mark.parametrize("limits", LIMITS)
def test_a_day_that_is_prepared_again_changes_nothing(limits, by_event):
    days = [[(d, f"{i % (7 + d)}") for i in range(d, 30 + 2 * d)] for d in range(1, 5)]
    if not by_event:
        days = [[(0, value) for _, value in events] for events in days]
    else:  # two days have equal counts of events without a time
        days = [[*events, (NO_DAY, f"x{d // 2}")] for d, events in enumerate(days)]
    *_, last = chain(days, limits, by_event=by_event)
    for day in days:
        *_, again = chain([*days, day], limits, by_event=by_event)
        assert plain_state(*again[:2]) == plain_state(*last[:2])
        assert again[2].new == again[2].evicted == 0
        assert again[2].lookups == len(day)
    if by_event and limits == Limits(3, 0, 0, 1000):
        assert plain_state(*last[:2])[3:5] == (["x0", "x1"], [2, 2])
    if by_event:  # earlier versions recorded the checksum of events without a time alone
        vocabulary, history, _ = last
        plain = [admission._checksum(counters(day)[NO_DAY].counts()) for day in days]
        earlier = history._replace(counted=history.counted | {NO_DAY: plain})
        for day in days:
            events = counters(day)
            again = admit(
                events,
                limits,
                newest=max(events),
                by_event=True,
                earlier=vocabulary,
                history=earlier,
            )
            assert plain_state(*again[:2]) == plain_state(vocabulary, earlier)
    if by_event:  # only what has not been counted is added
        *_, longer = chain([*days, [*days[0][:-1], (9, "9")]], limits)
        *_, plain = chain([*days, [(9, "9")]], limits)
        assert plain_state(*longer[:2]) == plain_state(*plain[:2])


def test_what_preparations_without_days_counted_is_not_counted_again_by_day():
    days = [[(day, f"{i % day}") for i in range(20 + day)] for day in range(11, 15)]
    both = [*days[2], *days[3]]  # of one preparation
    limits = Limits(3, 0, 0, 1000)
    prepared = [[(0, value) for _, value in events] for events in (*days[:2], both)]
    *_, (vocabulary, history, _) = chain(prepared, limits, by_event=False)

    def add(events, vocabulary, history):
        newest = max(day for day, _ in events)
        return admit(
            counters(events), limits, newest=newest, by_event=True,
            earlier=vocabulary, history=history,
        )  # fmt: skip

    for events in (*days[:2], both, [*days[0], *days[1]]):
        again = add(events, vocabulary, history)
        assert plain_state(*again[:2]) == plain_state(vocabulary, history)
        assert not again.history.by_event
    longer = add([*days[1], (30, "x")], vocabulary, history)
    assert longer.vocabulary.counts.tolist() == vocabulary.counts.tolist()
    waiting = [h.waiting["value"].to_pylist() for h in (history, longer.history)]
    assert waiting[1] == [*waiting[0], "x"]
    for events in (days[0], both, [(30, "x")]):  # also in the stores after it
        again = add(events, longer.vocabulary, longer.history)
        assert plain_state(*again[:2]) == plain_state(*longer[:2])


def test_ids_of_a_version_without_days_were_seen_before_the_first_event():
    ((vocabulary, history, _),) = chain([[(5, "a"), (5, "b")]], Limits())
    for earlier in (None, history._replace(by_event=False)):
        events = counters([(30, "a"), (31, "c"), (NO_DAY, "d")])
        result = admit(
            events, Limits(keep_days=3, max_waiting=9), newest=31, by_event=True,
            earlier=vocabulary, history=earlier,
        )  # fmt: skip
        assert result.vocabulary.values.to_pylist() == ["a", "b", "c"]
        assert result.history.last_days.tolist() == [30, 29, 31]
        assert result.history.waiting.num_rows == 0  # d was not seen on any day
