"""Ragged arrays: concatenated values of lists, and the length of each list."""

from collections.abc import Iterator, Sequence

import numpy as np


def list_starts(lengths: np.ndarray) -> np.ndarray:
    """Returns i64[..], the index of each list's first value, for lists in the order of `lengths`
    [..].
    """
    ends = np.cumsum(lengths, dtype=np.int64).reshape(lengths.shape)
    return ends - lengths


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns i64[total]: start, start + 1, ... for the length of each list. Both arguments are
    [lists].
    """
    indices = np.repeat(starts - list_starts(lengths), lengths)
    indices += np.arange(len(indices))
    return indices


def places_of_lists(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Yields, for each list of i32[n, lists], the indices i64[..] of its values.

    Values are concatenated by example and within an example by list.
    """
    for starts, list_lengths in zip(list_starts(lengths).T, lengths.T, strict=True):
        yield ranges(starts, list_lengths)


def positions(lengths: np.ndarray) -> np.ndarray:
    """Returns i64[total], the position of each value in its list, for lengths [lists]."""
    return ranges(np.zeros(len(lengths), np.int64), lengths)


def select_lists(
    lists: Sequence[int], lengths: np.ndarray, values: np.ndarray, weights: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Returns lengths i32[n, len(lists)], values and weights of the selected lists.

    Args:
        lists: increasing indices of the selected lists.
        lengths: i32[n, lists of an example].
        values: [total], by example and within an example by list.
        weights: [total], or None.
    """
    if len(lists) == lengths.shape[1]:
        return lengths, values, weights
    # An index per selected value, or a mask of all values: 250 and 1070 us if 1 of 8 lists is
    # selected (64 values per example), 1280 and 1300 us for 6 of 8.
    use_index = 2 * len(lists) <= lengths.shape[1]
    where = _value_index(lists, lengths) if use_index else _value_mask(lists, lengths)
    return lengths.take(lists, axis=1), values[where], None if weights is None else weights[where]


def _value_index(lists: Sequence[int], lengths: np.ndarray) -> np.ndarray:  # i64[selected values]
    starts = list_starts(lengths).take(lists, axis=1)
    return ranges(starts.reshape(-1), lengths.take(lists, axis=1).reshape(-1))


def _value_mask(lists: Sequence[int], lengths: np.ndarray) -> np.ndarray:  # bool[values]
    chosen = np.zeros(lengths.shape[1], bool)
    chosen[list(lists)] = True
    return np.repeat(np.tile(chosen, len(lengths)), lengths.reshape(-1))
