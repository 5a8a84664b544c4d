"""Converts examples to the Batch that a step consumes."""

from collections.abc import Mapping, Sequence

import numpy as np

from jaxrank.data.batches.buffers import Shape, map_arrays
from jaxrank.data.batches.packing import Packer
from jaxrank.data.batches.stack_rows import StackRows
from jaxrank.data.examples import Examples, join, joined
from jaxrank.data.ragged import positions, select_lists
from jaxrank.errors import InputError
from jaxrank.features import PAD, Batch
from jaxrank.layout import Layout, Stack, make_batch

# Below this number of examples per part, joining all parts costs less than iterating over them.
_FEW = 256


class Batcher:
    """Makes batches of examples. The arguments are those of `packing.Packer`.

    The constructor does the work that all batches share. A Batcher is sent to input workers.

    Raises, when called:
        InputError: an id is not a row of its table, a sequence has more ids than positions, or
            lists do not fit.
    """

    def __init__(
        self, layout: Layout, group: int, capacities: Mapping[str, int], overflow: str = "error"
    ):
        self._layout, self._group, self._capacities = layout, group, capacities
        self._ids = {s.name: _Ids(layout, s) for s in layout.stacks if s.places}
        self._packer = Packer(layout, group, capacities, overflow)

    def __call__(self, *parts: Examples) -> Batch:
        """Returns the batch of all examples of the parts, each array in newly allocated memory."""
        logit_correction = (
            0 if parts[0].logit_correction is None else parts[0].logit_correction.shape[1]
        )
        shapes = self.shapes(sum(p.rows for p in parts), logit_correction)
        batch = map_arrays(lambda array: np.empty(array.shape, array.dtype), shapes)
        self.fill(batch, parts)
        return batch

    def shapes(self, rows: int, logit_correction: int, requests: bool = False) -> Batch:
        """Returns the `Shape`s of a batch of `rows` examples and `logit_correction` columns.

        Args:
            requests: whether examples have requests, as in a `packs.PackedSplit`.
        """
        sizes = (rows, self._group, self._capacities)
        return make_batch(Shape, self._layout, *sizes, logit_correction, requests)

    def fill(self, batch: Batch, parts: Sequence[Examples]) -> None:
        """Writes a batch of examples, in one or more parts, to existing arrays."""
        rows = len(batch.labels)
        if rows < _FEW * len(parts):
            parts = [join(parts)]
        np.concatenate([p.dense for p in parts], out=batch.dense)
        for name, ids in self._ids.items():
            ids.fill(batch.ids[name], parts)
        self._fill_lists(batch, parts)
        labels, weights = joined(parts, "labels"), joined(parts, "weights")
        known = ~np.isnan(labels)
        batch.labels[...] = np.where(known, labels, np.float32(0))
        weights = np.float32(1) if weights is None else weights
        batch.weights[...] = np.where(known, weights, np.float32(0))
        if parts[0].logit_correction is not None:
            np.concatenate([p.logit_correction for p in parts], out=batch.logit_correction)
        if isinstance(batch.requests, np.ndarray):
            batch.requests[...] = joined(parts, "requests")[:, 0]

    def _fill_lists(self, batch: Batch, parts: Sequence[Examples]) -> None:
        lengths, values = joined(parts, "list_lengths"), [p.list_values for p in parts]
        weights = [p.list_weights for p in parts if p.list_weights is not None]
        self._packer.fill(batch.lists, batch.dropped, lengths, values, weights)


class _Ids:
    """Converts the id columns and sequences of one stack to i32[n, places], the layout of
    `Batch.ids`.
    """

    def __init__(self, layout: Layout, stack: Stack):
        self.places = stack.places
        self._columns, self._sequences = list(stack.columns), list(stack.sequences)
        columns = [f.name for f in layout.schema.id_columns]
        self._names = [layout.schema.ragged[i].name for i in self._sequences]
        self._lengths = np.asarray(stack.sequence_lengths, np.int64)
        # The sequence of each place, and below the position in that sequence.
        self._owner = np.repeat(np.arange(len(self._lengths)), self._lengths)
        self._position = positions(self._lengths)
        names = [columns[i] for i in self._columns] + [self._names[i] for i in self._owner]
        tables = [*stack.column_tables, *(stack.sequence_tables[i] for i in self._owner)]
        self._rows = StackRows(layout, stack, names, tables)

    def fill(self, out: np.ndarray, parts: Sequence[Examples]) -> None:
        """Fills `out` i32[n, places]."""
        columns = [p.ids for p in parts]
        if len(self._columns) < columns[0].shape[1]:
            columns = [ids.take(self._columns, axis=1) for ids in columns]
        np.concatenate(columns, out=out[:, : len(self._columns)])
        if self._sequences:
            self._fill_sequences(out[:, len(self._columns) :], parts)
        self._rows.matrix(out, out)

    def _fill_sequences(self, out: np.ndarray, parts: Sequence[Examples]) -> None:
        lengths, values = joined(parts, "list_lengths"), joined(parts, "list_values")
        lengths, values, _ = select_lists(self._sequences, lengths, values, None)
        self._check(lengths)
        out.fill(PAD)
        # Filled places and ids are both in order of example, list and position.
        out[self._position < lengths.take(self._owner, axis=1)] = values

    def _check(self, lengths: np.ndarray) -> None:  # i32[n, sequences]
        too_long = lengths > self._lengths
        if too_long.any():
            example, i = np.argwhere(too_long)[0].tolist()
            places = self._lengths[i]
            raise InputError(
                f"Example {example} of the batch: the feature {self._names[i]!r} must have at"
                f" most {places} ids, as many as its sequence has places: found"
                f" {lengths[example, i]}."
                f" Prepare the data again with max_length={places}."
            )
