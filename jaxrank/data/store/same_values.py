"""Maps rows of one table to the rows of another table that stand for the same values."""

from collections.abc import Callable

import numpy as np
import pyarrow.compute as pc

from jaxrank.data.store.reader import Store
from jaxrank.errors import InputError
from jaxrank.features import PAD, RESERVED_ROWS, UNKNOWN_ROW, Table


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
        differing = "buckets" if old.encoding == "bucket" else "number or salt of hashed rows"
        return f"its {differing} differ"
    if new_store.extends(old):
        return rows
    old_store = open_old()
    _check_key(old_store, new_store)
    check_extends(old_store, old)
    before = old_store.values(old.name).slice(0, old.rows - RESERVED_ROWS)
    indices = pc.index_in(before, value_set=new_store.values(new.name))
    row = indices.fill_null(int(PAD) - RESERVED_ROWS).to_numpy() + RESERVED_ROWS
    rows[RESERVED_ROWS:] = row
    return rows


def rows_in_model(model: Table, store: Store, open_own: Callable[[], Store]) -> np.ndarray | None:
    """Returns i32[rows of the store's table], the row of a model's table with the same value.

    Values that the model does not have map to UNKNOWN_ROW. None: all rows are the same.

    Args:
        model: a vocabulary that the model was trained with. `store` has a table of that name.
        open_own: opens the store that the model was trained on. It is called only if needed.

    Raises:
        InputError: as in `same_values`.
    """
    table = store.table(model.name)
    assert table is not None
    if table == model:
        return None
    if store.extends(model):
        rows = np.arange(table.rows, dtype=np.int32)
    else:
        run_store = open_own()
        _check_key(store, run_store)
        check_extends(run_store, model)
        own_table = run_store.table(model.name)
        assert own_table is not None
        mapped = same_values(table, own_table, run_store, lambda: store)
        assert isinstance(mapped, np.ndarray)
        rows = mapped
    return np.where(rows < model.rows, rows, np.int32(UNKNOWN_ROW))


def check_extends(store: Store, table: Table) -> None:
    """Raises InputError unless a store has a vocabulary or an extension of it."""
    if not store.extends(table):
        raise InputError(
            f"{store.path}: must hold the vocabulary of {table.name!r} that the earlier run was"
            " trained with, to match rows by value: found a different vocabulary. Use the store"
            " of the earlier run."
        )


def _check_key(old: Store, new: Store) -> None:
    if old.spec.hash_key != new.spec.hash_key:
        raise InputError(
            f"{new.path}: must have been prepared with the same --hash-key-file as {old.path}, or"
            " both without one, so that their values can be compared: found another key."
        )
