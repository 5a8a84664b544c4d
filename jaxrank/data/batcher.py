"""Examples -> the Batch that a step consumes."""

from collections.abc import Mapping

import numpy as np

from jaxrank.data.examples import Examples
from jaxrank.data.packing import Packer, select
from jaxrank.data.stack_rows import StackRows
from jaxrank.errors import InputError
from jaxrank.features import PAD, Batch, Layout, Stack


class Batcher:
    """Makes batches of examples; the arguments are those of `packing.Packer`.

    What is made once for all batches is made here; it travels to input workers.

    Raises, when called:
        InputError: an id is no row of its table, a sequence has more ids than places, lists do not
            fit.
    """

    def __init__(
        self, layout: Layout, group: int, capacities: Mapping[str, int], overflow: str = "error"
    ):
        self._ids = {s.name: _Ids(layout, s) for s in layout.stacks if s.places}
        self._packer = Packer(layout, group, capacities, overflow)

    def __call__(self, examples: Examples) -> Batch:
        lists, dropped = self._packer(examples.lengths, examples.values, examples.value_weights)
        known = ~np.isnan(examples.labels)
        weights = np.float32(1) if examples.weights is None else examples.weights
        return Batch(
            floats=examples.floats,
            ids={name: ids(examples) for name, ids in self._ids.items()},
            lists=lists,
            labels=np.where(known, examples.labels, np.float32(0)),
            weights=np.where(known, weights, np.float32(0)),
            dropped=dropped,
            shifts=_no_shifts(examples.rows) if examples.shifts is None else examples.shifts,
        )


def _no_shifts(rows: int) -> np.ndarray:
    return np.zeros((rows, 0), np.float32)


class _Ids:
    """The id columns and sequences of one stack -> i32[n, places], as `Batch.ids` has them."""

    def __init__(self, layout: Layout, stack: Stack):
        self._columns, self._sequences = list(stack.columns), list(stack.sequences)
        columns = [f.name for f in layout.schema.ids for _ in range(f.length)]
        self._names = [layout.schema.lists[i].name for i in self._sequences]
        self._lengths = np.asarray(stack.sequence_lengths, np.int64)
        # Of each place of the sequences: which of them, and the position in it.
        self._owner = np.repeat(np.arange(len(self._lengths)), self._lengths)
        starts = np.cumsum(self._lengths) - self._lengths
        self._position = np.arange(len(self._owner)) - starts[self._owner]
        names = [columns[i] for i in self._columns] + [self._names[i] for i in self._owner]
        tables = [*stack.column_tables, *(stack.sequence_tables[i] for i in self._owner)]
        self._rows = StackRows(layout, stack, names, tables)

    def __call__(self, examples: Examples) -> np.ndarray:
        every = len(self._columns) == examples.ids.shape[1]
        columns = examples.ids if every else examples.ids.take(self._columns, axis=1)
        if not self._sequences:
            return self._rows.matrix(columns)
        lengths, values, _ = select(self._sequences, examples.lengths, examples.values, None)
        self._check(lengths)
        rows = np.full((examples.rows, len(self._columns) + len(self._owner)), PAD, np.int32)
        rows[:, : len(self._columns)] = columns
        # Both the places that are filled and the ids are in order of example, list and position.
        filled = self._position < lengths.take(self._owner, axis=1)
        rows[:, len(self._columns) :][filled] = values
        return self._rows.matrix(rows)

    def _check(self, lengths: np.ndarray) -> None:  # i32[n, sequences]
        too_long = lengths > self._lengths
        if too_long.any():
            example, i = np.argwhere(too_long)[0].tolist()
            places = self._lengths[i]
            raise InputError(
                f"Example {example} of the batch: the list {self._names[i]!r} must have at most"
                f" {places} ids, as many as its sequence has places: found {lengths[example, i]}."
                f" Prepare the data again with max_length={places}."
            )
