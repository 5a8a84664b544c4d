"""A block of a store: consecutive examples as an Arrow record batch."""

import numpy as np
import pyarrow as pa
import xxhash

from jaxrank import renames
from jaxrank.data.examples import Examples

# The matrices of a block, in the order of its columns.
_DTYPES = {
    "dense": np.float32,
    "ids": np.int32,
    "list_lengths": np.int32,
    "labels": np.float32,
    "weights": np.float32,
    "truth": np.float32,
    "logit_correction": np.float32,
    "requests": np.int64,
}


def to_arrow(examples: Examples) -> pa.RecordBatch:
    columns: dict[str, pa.Array] = {}
    for name in _DTYPES:
        matrix = getattr(examples, name)
        if matrix is not None:
            values = pa.array(np.ascontiguousarray(matrix).reshape(-1))
            # Skipped, because Arrow cannot represent the rows of a matrix without columns.
            if matrix.shape[1]:
                columns[name] = pa.FixedSizeListArray.from_arrays(values, matrix.shape[1])
    if examples.list_lengths.shape[1]:
        offsets = pa.array(examples.list_ends)
        columns["list_values"] = pa.LargeListArray.from_arrays(
            offsets, pa.array(examples.list_values)
        )
        if examples.list_weights is not None:
            columns["list_weights"] = pa.LargeListArray.from_arrays(
                offsets, pa.array(examples.list_weights)
            )
    if examples.kept is not None:
        for name in examples.kept.schema.names:
            columns[f"kept.{name}"] = examples.kept.column(name)
    return pa.RecordBatch.from_pydict(columns)


def from_arrow(batch: pa.RecordBatch) -> Examples:
    rows = batch.num_rows
    batch = batch.rename_columns([renames.COLUMNS.get(n, n) for n in batch.schema.names])
    names = set(batch.schema.names)

    def matrix(name: str) -> np.ndarray:
        if name not in names:
            return np.zeros((rows, 0), _DTYPES[name])
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
    return Examples(
        dense=matrix("dense"),
        ids=matrix("ids"),
        list_lengths=matrix("list_lengths"),
        list_values=values("list_values", np.int32),
        list_weights=values("list_weights", np.float32) if "list_weights" in names else None,
        labels=matrix("labels"),
        weights=matrix("weights") if "weights" in names else None,
        truth=matrix("truth") if "truth" in names else None,
        kept=pa.RecordBatch.from_pydict(kept) if kept else None,
        logit_correction=matrix("logit_correction") if "logit_correction" in names else None,
        requests=matrix("requests") if "requests" in names else None,
    )


def block_checksum(batch: pa.RecordBatch) -> str:
    """Returns a checksum of all values of a block and their types, independent of the file."""
    digest = xxhash.xxh3_64()
    for field, column in zip(batch.schema, batch.columns, strict=True):
        # Only this checksum covers the names, types and lengths, which define how to read the
        # bytes.
        digest.update(f"{field.name}: {field.type} [{len(column)}]\n".encode())
        for buffer in column.buffers():
            if buffer is not None:
                digest.update(buffer)
    return digest.hexdigest()
