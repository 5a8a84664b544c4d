"""Tests of prefetching batches to the devices."""

import contextlib
import itertools
import threading
import time

import pytest

from jaxrank.runtime.prefetch import DevicePrefetcher


class Counted:
    """Yields 0, 1, 2, ... and counts how many were taken."""

    def __init__(self, stop=10**9, error=None):
        self.taken, self._stop, self._error = 0, stop, error

    def __iter__(self):
        return self

    def __next__(self):
        if self.taken == self._stop:
            raise self._error or StopIteration
        self.taken += 1
        return self.taken - 1


def settled(read):
    """Returns the value of `read` once it no longer changes."""
    before = None
    while (now := read()) != before:
        before = now
        time.sleep(0.05)
    return now


def test_batches_come_in_order_each_put_once():
    put = []
    with contextlib.closing(
        DevicePrefetcher(Counted(20), lambda x: put.append(x) or x * 10)
    ) as feed:
        assert list(feed) == [10 * i for i in range(20)]
    assert put == list(range(20))


@pytest.mark.parametrize("ahead", [1, 3])
def test_the_next_batch_is_put_while_the_loop_does_not_ask_and_no_more_than_that(ahead):
    batches = Counted()
    with contextlib.closing(DevicePrefetcher(batches, lambda x: x, ahead)) as feed:
        for step in range(4):
            assert next(feed) == step
            assert settled(lambda: batches.taken) == step + 1 + ahead


def test_what_taking_or_putting_a_batch_raises_is_raised_where_it_was_due():
    with contextlib.closing(DevicePrefetcher(Counted(2, OSError("disk 3")), lambda x: x)) as feed:
        assert [next(feed), next(feed)] == [0, 1]
        with pytest.raises(OSError, match="disk 3"):
            next(feed)

    def put(x):
        return x // (x - 2)

    with contextlib.closing(DevicePrefetcher(Counted(), put)) as feed:
        assert [next(feed), next(feed)] == [0, -1]
        with pytest.raises(ZeroDivisionError):
            next(feed)


def test_nothing_is_taken_after_close_which_waits_for_what_is_being_put():
    batches, began, ended = Counted(), threading.Event(), []

    def put(x):
        began.set()
        time.sleep(0.2)
        ended.append(x)

    feed = DevicePrefetcher(batches, put, 2)
    began.wait()
    feed.close()
    assert ended == [0]
    taken = batches.taken
    time.sleep(0.1)
    assert batches.taken == taken == 1


def test_a_feed_of_nothing_ends_at_once():
    with contextlib.closing(DevicePrefetcher(iter(()), lambda x: x)) as feed:
        assert list(itertools.islice(feed, 1)) == []
