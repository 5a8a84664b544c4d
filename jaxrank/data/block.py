"""A block: consecutive examples as a few matrices, in memory and as an Arrow record batch."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

# The matrices of a block.
_MATRICES = {
    "floats": np.float32,
    "ids": np.int32,
    "list_lengths": np.int32,
    "labels": np.float32,
    "weights": np.float32,
    "truth": np.float32,
    "shifts": np.float32,
}


class Block(NamedTuple):
    """n consecutive examples.

    floats: f32[n, floats], transformed, nothing missing.
    ids: i32[n, id columns] rows of each column's table, or PAD.
    list_lengths: i32[n, lists].
    list_values: i32[total] rows of each list's table, example by example and within an example
        list by list.
    list_weights: f32[total], 1 in lists that are not weighted; None where no list is weighted.
    labels: f32[n, tasks], NaN where unknown; see `features.Task`.
    weights: f32[n, tasks] finite, not negative; None where no task is weighted.
    truth: f32[n, tasks] the planted probability of each label, NaN where the task has none; None
        where no task has one.
    kept: the columns that are passed through to predictions, of any Arrow types.
    shifts: f32[n, tasks] as of `features.Batch`; None where no task has any.
    """

    floats: np.ndarray
    ids: np.ndarray
    list_lengths: np.ndarray
    list_values: np.ndarray
    list_weights: np.ndarray | None
    labels: np.ndarray
    weights: np.ndarray | None
    truth: np.ndarray | None
    kept: pa.RecordBatch
    shifts: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(self.labels)


def concatenate(blocks: Sequence[Block]) -> Block:
    """One block of all examples, in order."""
    if len(blocks) == 1:
        return blocks[0]

    def joined(name: str) -> Any:
        arrays = [getattr(b, name) for b in blocks]
        return None if arrays[0] is None else np.concatenate(arrays)

    arrays = {name: joined(name) for name in Block._fields if name != "kept"}
    kept = pa.Table.from_batches([b.kept for b in blocks]).combine_chunks()
    batches = kept.to_batches()
    return Block(**arrays, kept=batches[0] if batches else blocks[0].kept)


def slice_block(block: Block, start: int, stop: int) -> Block:
    """The examples [start, stop), without a copy."""
    per_example = block.list_lengths.sum(axis=1, dtype=np.int64)
    first = int(per_example[:start].sum())
    last = first + int(per_example[start:stop].sum())

    def cut(array: np.ndarray | None, lo: int, hi: int) -> Any:
        return None if array is None else array[lo:hi]

    return Block(
        floats=block.floats[start:stop],
        ids=block.ids[start:stop],
        list_lengths=block.list_lengths[start:stop],
        list_values=block.list_values[first:last],
        list_weights=cut(block.list_weights, first, last),
        labels=block.labels[start:stop],
        weights=cut(block.weights, start, stop),
        truth=cut(block.truth, start, stop),
        kept=block.kept.slice(start, stop - start),
        shifts=cut(block.shifts, start, stop),
    )


def to_arrow(block: Block) -> pa.RecordBatch:
    columns: dict[str, pa.Array] = {}
    for name in _MATRICES:
        matrix = getattr(block, name)
        if matrix is not None:
            values = pa.array(np.ascontiguousarray(matrix).reshape(-1))
            # A matrix without columns cannot be told from one without rows; it is left out.
            if matrix.shape[1]:
                columns[name] = pa.FixedSizeListArray.from_arrays(values, matrix.shape[1])
    if block.list_lengths.shape[1]:
        ends = np.cumsum(block.list_lengths.sum(axis=1, dtype=np.int64))
        offsets = pa.array(np.concatenate([[0], ends]), pa.int64())
        columns["list_values"] = pa.LargeListArray.from_arrays(offsets, pa.array(block.list_values))
        if block.list_weights is not None:
            columns["list_weights"] = pa.LargeListArray.from_arrays(
                offsets, pa.array(block.list_weights)
            )
    for name in block.kept.schema.names:
        columns[f"kept.{name}"] = block.kept.column(name)
    return pa.RecordBatch.from_pydict(columns)


def from_arrow(batch: pa.RecordBatch) -> Block:
    rows = batch.num_rows
    names = set(batch.schema.names)

    def matrix(name: str) -> np.ndarray:
        if name not in names:
            return np.zeros((rows, 0), _MATRICES[name])
        column = batch.column(name)
        return column.flatten().to_numpy(zero_copy_only=True).reshape(rows, column.type.list_size)

    def values(name: str, dtype: type) -> np.ndarray:
        if name not in names:
            return np.zeros(0, dtype)
        return batch.column(name).flatten().to_numpy(zero_copy_only=True)

    kept = {
        n.removeprefix("kept."): batch.column(n)
        for n in batch.schema.names
        if n.startswith("kept.")
    }
    return Block(
        floats=matrix("floats"),
        ids=matrix("ids"),
        list_lengths=matrix("list_lengths"),
        list_values=values("list_values", np.int32),
        list_weights=values("list_weights", np.float32) if "list_weights" in names else None,
        labels=matrix("labels"),
        weights=matrix("weights") if "weights" in names else None,
        truth=matrix("truth") if "truth" in names else None,
        kept=pa.RecordBatch.from_pydict(kept),
        shifts=matrix("shifts") if "shifts" in names else None,
    )


def block_checksum(batch: pa.RecordBatch) -> str:
    """Of all the values of a block, whatever file they lie in, and of what they are."""
    digest = xxhash.xxh3_64()
    for field, column in zip(batch.schema, batch.columns, strict=True):
        # Nothing else guards the names, types and lengths, which tell how to read the bytes.
        digest.update(f"{field.name}: {field.type} [{len(column)}]\n".encode())
        for buffer in column.buffers():
            if buffer is not None:
                digest.update(buffer)
    return digest.hexdigest()
