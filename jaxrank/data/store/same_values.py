"""Maps rows of one table to the rows of another table that stand for the same values."""

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
    """Returns i32[old.rows], the row of `new` for the value of each row of `old`, or PAD if it has
    none.

    If the rows of the two tables are unrelated, returns the reason as text. Raw values are
    compared. For tables of row numbers these are the numbers. Rows of missing and unknown values
    correspond.

    Args:
        old: a table of the store that `open_old` opens. It is called only if needed.
        new: the table of that name in `new_store`.

    Raises:
        InputError: a required vocabulary is missing, corrupt, or was made with another key.
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
        return f"its {what} differ"
    if new_store.extends(old):
        return rows
    old_store = open_old()
    _check_key(old_store, new_store)
    if not old_store.extends(old):
        raise InputError(
            f"{old_store.path}: must hold the vocabulary of {old.name!r} that the earlier run was"
            " trained with, to match rows by value, but it has been prepared again."
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
            " both without one, so that their values can be compared: found another key."
        )
