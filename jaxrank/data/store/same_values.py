"""Which rows of two tables stand for the same value."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jaxrank.data.store.reader import Store
from jaxrank.errors import InputError
from jaxrank.features import PAD, RESERVED_ROWS, Table


def same_values(
    old: Table, new: Table, new_store: Store, open_old: Callable[[], Store]
) -> np.ndarray | str:
    """i32[old.rows]: the row of `new` for the value of each row of `old`, PAD where it has none; or
    why rows of the two have nothing to do with each other.

    Values are compared as they were in the data; row numbers are values. Rows of missing and
    unknown values are the same in both.

    Args:
        old: a table of the store that `open_old` opens, which is done only where it is needed.
        new: the table of that name in `new_store`.

    Raises:
        InputError: a vocabulary is needed that is not there, is damaged, or was made under another
            key.
    """
    if old.encoding != new.encoding:
        return f"its encoding is {new.encoding}, was {old.encoding}"
    rows = np.arange(old.rows, dtype=np.int32)
    if old == new:
        return rows
    if old.encoding == "integer":
        return np.where(rows < new.rows, rows, PAD)
    if old.encoding != "vocabulary":
        what = "buckets" if old.encoding == "bucket" else "number or salt of hashed rows"
        return f"its {what} are others"
    if new_store.extends(old):
        return rows
    old_store = open_old()
    _check_key(old_store, new_store)
    if not old_store.extends(old):
        raise InputError(
            f"{old_store.path}: must hold the vocabulary of {old.name!r} that the older run was"
            " trained with, to know which rows are of the same value, but it was prepared anew."
        )
    before = old_store.vocabulary(old.name)[0][: old.rows - RESERVED_ROWS]
    after, _ = new_store.vocabulary(new.name)
    indices = pc.index_in(pa.array(before, pa.string()), value_set=pa.array(after, pa.string()))
    row = indices.fill_null(int(PAD) - RESERVED_ROWS).to_numpy() + RESERVED_ROWS
    rows[RESERVED_ROWS:] = row
    return rows


def _check_key(old: Store, new: Store) -> None:
    if old.spec.hash_key != new.spec.hash_key:
        raise InputError(
            f"{new.path}: must have been prepared with the same --hash-key-file as {old.path}, or"
            " both without one, for their values to be compared: found another."
        )
