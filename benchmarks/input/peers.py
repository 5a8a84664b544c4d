"""Other loaders on the data of benchmarks/input/pipeline.py, which starts this script.

All run on one core. They read NumPy columns in memory, or a TFRecord file in the page cache. All
permute the whole data set, except tf_tfrecord, which has a shuffle buffer. They produce the input
of a step: floats, labels, row ids in one table of all tables' rows, and lists packed into arrays of
fixed size. The loaders of TensorFlow leave lists ragged, which costs less.

grain: reads single examples and collates them.
torch: a DataLoader that reads single examples, with the same collate function.
torch_batches: a DataLoader whose dataset returns whole batches by NumPy indexing.
tf_tfrecord: TFRecord of tf.Example, a buffer of 16 batches, parsed in whole batches.
tf_slices: from_tensor_slices of columns, batched.
tf_gather: gathers whole batches by index in TensorFlow.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness.arguments import positive
from benchmarks.harness.in_turn import serve
from jaxrank.data.batches import packing
from jaxrank.data.store.reader import open_store
from jaxrank.features import MAX_GROUP, PAD
from jaxrank.layout import layout

ROWS = 200_000  # first rows of the store that are read; more would not be faster
WARM_BATCHES = 4


class Columns(NamedTuple):
    """Columns of all examples. `ends`: i64[n + 1], offsets of the lists of examples in `values`."""

    floats: np.ndarray
    ids: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    values: np.ndarray
    ends: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.labels)


class Data:
    """Columns in memory, and functions that build batches from them."""

    def __init__(self, path: Path):
        store = open_store(path)
        split = store.split("train")
        blocks: list[Any] = []
        while sum(b.rows for b in blocks) < min(ROWS, split.rows):
            blocks.append(split.read_block(len(blocks)))
        names = ("floats", "ids", "labels", "list_lengths", "list_values")
        arrays = [np.concatenate([getattr(b, name) for b in blocks]) for name in names]
        ends = np.append(0, np.cumsum(arrays[3].sum(axis=1, dtype=np.int64)))
        self.columns = Columns(**dict(zip(Columns._fields, [*arrays, ends], strict=True)))
        (stack,) = layout(store.schema, {t.name: 16 for t in store.schema.tables}).stacks
        offsets = np.asarray(stack.offsets, np.int32)
        self.offsets = offsets[list(stack.column_tables)]
        self.list_offsets = offsets[list(stack.list_tables)]
        self.room = packing.capacity(stack, split.statistics, MAX_GROUP) if stack.lists else 0

    def example(self, i: int) -> dict[str, np.ndarray]:
        c = self.columns
        return {
            "floats": c.floats[i],
            "ids": c.ids[i],
            "labels": c.labels[i],
            "lengths": c.lengths[i],
            "values": c.values[c.ends[i] : c.ends[i + 1]],
        }

    def collate(self, examples: Any) -> dict[str, np.ndarray]:
        """Builds a batch from single examples."""
        stacked = {
            name: np.stack([e[name] for e in examples])
            for name in ("floats", "ids", "labels", "lengths")
        }
        return self.to_batch(stacked, np.concatenate([e["values"] for e in examples]))

    def taken(self, index: np.ndarray) -> dict[str, np.ndarray]:
        """Builds a batch from the examples of an index."""
        c = self.columns
        names = ("floats", "ids", "labels", "lengths")
        stacked = {name: getattr(c, name).take(index, axis=0) for name in names}
        sizes = c.ends[index + 1] - c.ends[index]
        starts = np.cumsum(sizes) - sizes
        where = np.repeat(c.ends[index] - starts, sizes) + np.arange(sizes.sum())
        return self.to_batch(stacked, c.values[where])

    def to_batch(self, batch: dict[str, np.ndarray], values: np.ndarray) -> dict[str, np.ndarray]:
        batch["ids"] = batch["ids"] + self.offsets
        lengths = batch.pop("lengths")
        if lengths.shape[1]:
            batch |= self._packed(lengths, values)
        return batch

    def _packed(self, lengths: np.ndarray, values: np.ndarray) -> dict[str, np.ndarray]:
        groups = len(lengths) // MAX_GROUP
        by_group = lengths.reshape(groups, -1)
        offsets = np.tile(self.list_offsets, MAX_GROUP)
        ids = np.full((groups, self.room), PAD, np.int32)
        segments = np.full((groups, self.room), PAD, np.int32)
        weights = np.zeros((groups, self.room), np.float32)
        stops = np.cumsum(by_group.sum(axis=1))
        for g, (lengths_of_group, stop) in enumerate(zip(by_group, stops.tolist(), strict=True)):
            lists = np.repeat(np.arange(len(lengths_of_group)), lengths_of_group)
            n = len(lists)
            ids[g, :n] = values[stop - n : stop] + offsets[lists]
            segments[g, :n] = lists
            weights[g, :n] = (1 / np.maximum(lengths_of_group, 1)).astype(np.float32)[lists]
        return {"list_ids": ids, "segments": segments, "weights": weights}


def grain(data: Data, size: int, path: Path) -> Iterator[int]:
    import grain

    class Examples:
        def __len__(self) -> int:
            return data.columns.rows

        def __getitem__(self, i: Any) -> dict[str, np.ndarray]:
            return data.example(i)

    batches = grain.MapDataset.source(Examples()).shuffle(seed=0).repeat()
    batches = batches.batch(size, drop_remainder=True, batch_fn=data.collate)
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return (len(b["labels"]) for b in batches.to_iter_dataset(options))


def torch(data: Data, size: int, path: Path) -> Iterator[int]:
    import torch

    torch.set_num_threads(1)

    class Examples(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return data.columns.rows

        def __getitem__(self, i: int) -> dict[str, np.ndarray]:
            return data.example(i)

    loader = torch.utils.data.DataLoader(
        Examples(),
        batch_size=size,
        shuffle=True,
        drop_last=True,
        collate_fn=lambda examples: _tensors(data.collate(examples)),
    )
    return (len(batch["labels"]) for batch in _endless(loader))


def torch_batches(data: Data, size: int, path: Path) -> Iterator[int]:
    import torch

    torch.set_num_threads(1)

    class Batches(torch.utils.data.Dataset):
        def __getitem__(self, index: np.ndarray) -> dict[str, Any]:
            return _tensors(data.taken(index))

    class Shuffled(torch.utils.data.Sampler):
        def __iter__(self) -> Iterator[np.ndarray]:
            order = np.random.default_rng().permutation(data.columns.rows)
            return iter(order[: len(order) // size * size].reshape(-1, size))

    loader = torch.utils.data.DataLoader(Batches(), sampler=Shuffled(), batch_size=None)
    return (len(batch["labels"]) for batch in _endless(loader))


def _tensors(batch: dict[str, np.ndarray]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in batch.items()}


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def tf_tfrecord(data: Data, size: int, path: Path) -> Iterator[int]:
    tf = _tensorflow()
    records = path / f"first-{data.columns.rows}.tfrecord"
    if not records.exists():
        _write_records(tf, data, records)
    c = data.columns
    fixed = tf.io.FixedLenFeature
    features = {
        "floats": fixed([c.floats.shape[1]], tf.float32),
        "ids": fixed([c.ids.shape[1]], tf.int64),
        "labels": fixed([1], tf.float32),
    }
    for i in range(c.lengths.shape[1]):
        features[f"l{i}"] = tf.io.RaggedFeature(tf.int64)

    def parsed(serialized: Any) -> dict[str, Any]:
        example = tf.io.parse_example(serialized, features)
        example["ids"] = tf.cast(example["ids"], tf.int32) + data.offsets
        return example

    batches = tf.data.TFRecordDataset(str(records)).repeat().shuffle(16 * size)
    batches = batches.batch(size, drop_remainder=True).map(parsed).prefetch(1)
    return (len(b["labels"]) for b in batches.as_numpy_iterator())


def _write_records(tf: Any, data: Data, path: Path) -> None:
    def longs(values: np.ndarray) -> Any:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values.tolist()))

    def floats(values: np.ndarray) -> Any:
        return tf.train.Feature(float_list=tf.train.FloatList(value=values.tolist()))

    with tf.io.TFRecordWriter(str(path)) as writer:
        for i in range(data.columns.rows):
            e = data.example(i)
            lists = np.split(e["values"], np.cumsum(e["lengths"])[:-1]) if len(e["lengths"]) else []
            feature = {f"l{j}": longs(values) for j, values in enumerate(lists)}
            feature |= {"floats": floats(e["floats"]), "ids": longs(e["ids"])}
            feature["labels"] = floats(e["labels"])
            writer.write(
                tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
            )


def tf_slices(data: Data, size: int, path: Path) -> Iterator[int]:
    tf = _tensorflow()
    batches = tf.data.Dataset.from_tensor_slices(_tf_columns(tf, data))
    batches = batches.shuffle(data.columns.rows).repeat().batch(size, drop_remainder=True)

    def to_rows(batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {"ids": batch["ids"] + data.offsets}

    return (len(b["labels"]) for b in batches.map(to_rows).prefetch(1).as_numpy_iterator())


def tf_gather(data: Data, size: int, path: Path) -> Iterator[int]:
    tf = _tensorflow()
    columns = _tf_columns(tf, data)

    def taken(index: Any) -> dict[str, Any]:
        batch = {name: tf.gather(column, index) for name, column in columns.items()}
        return batch | {"ids": batch["ids"] + data.offsets}

    def order() -> Iterator[np.ndarray]:
        while True:
            rows = np.random.default_rng().permutation(data.columns.rows)
            yield from rows[: len(rows) // size * size].reshape(-1, size)

    index = tf.data.Dataset.from_generator(order, output_signature=tf.TensorSpec((size,), tf.int64))
    batches = index.map(taken).prefetch(1)
    return (len(b["labels"]) for b in batches.as_numpy_iterator())


def _tensorflow() -> Any:
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    return tf


def _tf_columns(tf: Any, data: Data) -> dict[str, Any]:
    c = data.columns
    columns = {"floats": c.floats, "ids": c.ids, "labels": c.labels}
    if c.lengths.shape[1]:
        rows = tf.RaggedTensor.from_row_lengths(c.values, c.lengths.reshape(-1))
        columns["lists"] = tf.RaggedTensor.from_uniform_row_length(rows, c.lengths.shape[1])
    return columns


PEERS: dict[str, Callable[[Data, int, Path], Iterator[int]]] = {
    peer.__name__: peer for peer in (grain, torch, torch_batches, tf_tfrecord, tf_slices, tf_gather)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("store", type=Path)
    parser.add_argument("--batch-size", type=positive, default=8192)
    args = parser.parse_args()
    peer = PEERS[args.peer]
    serve(
        lambda: peer(Data(args.store), args.batch_size, args.store),
        WARM_BATCHES * args.batch_size,
    )


if __name__ == "__main__":
    main()
