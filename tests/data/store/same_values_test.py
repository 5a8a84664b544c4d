"""Rows of tables without a vocabulary stay or restart when the tables change."""

import numpy as np
import pytest

from jaxrank.data.store.same_values import same_values
from jaxrank.features import PAD, Table


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (("integer", 4), ("integer", 6), [0, 1, 2, 3]),
        (("integer", 4), ("integer", 2), [0, 1, PAD, PAD]),
        (("hash", 4, "a"), ("hash", 4, "a"), [0, 1, 2, 3]),
        (("hash", 4, "a"), ("hash", 6, "b"), "its number or salt of hashed rows differ"),
        (("hash", 4), ("integer", 4), "its encoding is integer, was hash"),
    ],
)
def test_rows_without_a_vocabulary_are_matched_by_their_number(old, new, expected):
    tables = [Table("user", rows, encoding, *checksum) for encoding, rows, *checksum in (old, new)]
    rows = same_values(*tables, None, None)
    assert rows == expected if isinstance(expected, str) else np.array_equal(rows, expected)
