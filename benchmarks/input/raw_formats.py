"""Measures rows/s of reading TFRecord and Parquet files, and of training directly from Parquet.

    taskset -c 0 python -m benchmarks.input.raw_formats

A row has the columns of Criteo: a label, 13 floats and 26 ids. All files have the same rows. The
TFRecord source is compared with a simple loop that parses records with protobuf. Direct training
from Parquet, with row groups of one block and of sixteen, is compared with a store of blocks of
that size. Results are medians of rounds in which all run in turn.
"""

import argparse
import statistics
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

from benchmarks.harness.arguments import positive
from jaxrank.data.batches.pipeline import TrainBatches
from jaxrank.data.prepare.passes import prepare
from jaxrank.data.rejects import Rejects
from jaxrank.data.sources.registry import make_source
from jaxrank.data.sources.tfrecord import source as tfrecord
from jaxrank.data.sources.tfrecord import tf_example
from jaxrank.data.store import direct
from jaxrank.data.store.reader import Store
from jaxrank.layout import layout

_FEATURES = dict(
    tasks=[dict(name="click", label="label")],
    dense=[dict(columns="I*")],
    categorical=[dict(columns="C*", encoding="integer", rows=100_000)],
)


def make_table(rows: int) -> pa.Table:
    random = np.random.default_rng(1)
    columns: dict[str, np.ndarray] = {"label": random.integers(0, 2, rows)}
    columns |= {f"I{i}": random.normal(size=rows).astype(np.float32) for i in range(13)}
    columns |= {f"C{i}": random.zipf(1.2, rows) % 100_000 for i in range(26)}
    return pa.table(columns)


def _field(number: int, data: bytes) -> bytes:
    size = bytes([len(data)]) if len(data) < 128 else bytes([len(data) & 127 | 128, len(data) >> 7])
    return bytes([number << 3 | 2]) + size + data


def write_tfrecords(table: pa.Table, path: Path) -> None:
    """Writes ids as eight hexadecimal digits, as in Criteo."""
    with open(path, "wb") as file:
        for row in table.to_pylist():
            entries = []
            for name, value in row.items():
                if name[0] == "C":
                    feature = tf_example.plain("bytes", [b"%08x" % value])
                else:
                    feature = tf_example.plain("float32" if name[0] == "I" else "int64", [value])
                entries.append(_field(1, _field(1, name.encode()) + _field(2, feature)))
            data = _field(1, b"".join(entries))
            for part in (struct.pack("<Q", len(data)), data):
                crc = google_crc32c.value(part)
                crc = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
                file.write(part + struct.pack("<I", crc))


def read_source(kind: str, path: Path) -> int:
    source = make_source(dict(kind=kind, files=dict(train=str(path))))
    chunks = (c for part in source.parts("train") for c in source.chunks(part, Rejects()))
    return sum(chunk.batch.num_rows for chunk in chunks)


_LIST = """message_type { name: "%s"
  field { name: "value" number: 1 type: TYPE_%s label: LABEL_REPEATED } }"""
_LISTS = "\n".join(_LIST % pair for pair in (("B", "BYTES"), ("F", "FLOAT"), ("I", "INT64")))
_EXAMPLE = f"""
name: "plain.proto" package: "plain" syntax: "proto3"
{_LISTS}
message_type {{ name: "Feature" oneof_decl {{ name: "kind" }}
  field {{ name: "b" number: 1 type: TYPE_MESSAGE type_name: ".plain.B" oneof_index: 0 }}
  field {{ name: "f" number: 2 type: TYPE_MESSAGE type_name: ".plain.F" oneof_index: 0 }}
  field {{ name: "i" number: 3 type: TYPE_MESSAGE type_name: ".plain.I" oneof_index: 0 }} }}
message_type {{ name: "Features"
  nested_type {{ name: "FeatureEntry" options {{ map_entry: true }}
    field {{ name: "key" number: 1 type: TYPE_STRING }}
    field {{ name: "value" number: 2 type: TYPE_MESSAGE type_name: ".plain.Feature" }} }}
  field {{ name: "feature" number: 1 type: TYPE_MESSAGE label: LABEL_REPEATED
    type_name: ".plain.Features.FeatureEntry" }} }}
message_type {{ name: "Example"
  field {{ name: "features" number: 1 type: TYPE_MESSAGE type_name: ".plain.Features" }} }}
"""


def example_class() -> Any:
    """Returns a protobuf class with the declaration of tf.Example."""
    file = text_format.Parse(_EXAMPLE, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("plain.Example"))


def read_by_protobuf(path: Path) -> int:
    """Reads with a simple loop that parses records and appends each value to its column."""
    parsed = example_class()
    columns: dict[str, list] = {"label": []}
    columns |= {f"I{i}": [] for i in range(13)} | {f"C{i}": [] for i in range(26)}
    for record in tfrecord.read_records(str(path)):
        features = parsed.FromString(record.data).features.feature
        for name, values in columns.items():
            feature = features[name]
            values.append(getattr(feature, feature.WhichOneof("kind")).value[0])
    arrays = [pa.array(values) for values in columns.values()]
    return len(arrays[0])


def examples_per_second(store: Store, batch_size: int) -> float:
    """Measures one pass over the training split, in batches built by one thread."""
    split = store.split("train")
    steps = split.rows // batch_size
    batches = TrainBatches(
        split,
        layout(store.schema, {t.name: 16 for t in store.schema.tables}),
        batch_size=batch_size,
        steps_per_execution=1,
        seed=0,
        shards=8,
        window_blocks=4,
        num_workers=0,
        prefetch_batches=2,
        list_slack=8.0,
        on_overflow="error",
        order="shuffled",
        num_steps=steps,
    )
    start = time.perf_counter()
    for _ in batches:
        pass
    return steps * batch_size / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=positive, default=1 << 20)
    parser.add_argument("--records", type=positive, default=100_000)
    parser.add_argument("--rounds", type=positive, default=5)
    args = parser.parse_args()
    if args.rows < 8192:
        parser.error(f"--rows: must be at least 8,192, one batch: found {args.rows:,}")
    direct._BLOCK_ROWS = 8192
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        table = make_table(args.rows)
        write_tfrecords(table.slice(0, args.records), place / "a.tfrecord")
        sources = {}
        for blocks in (1, 16):
            path = place / f"{blocks}.parquet"
            pq.write_table(table, path, row_group_size=direct._BLOCK_ROWS * blocks)
            sources[blocks] = dict(kind="parquet", files=dict(train=str(path)))
        stores: dict[str, Any] = {
            "a store": prepare(_FEATURES, sources[1], place / "store", report=lambda _: None)
        }
        for blocks, source in sources.items():
            name = f"Parquet with row groups of {direct._BLOCK_ROWS * blocks:,} rows"
            stores[name] = direct.open_direct(_FEATURES, source)
        readers = {
            "TFRecord, the source": lambda: read_source("tfrecord", place / "a.tfrecord"),
            "TFRecord, simple loop": lambda: read_by_protobuf(place / "a.tfrecord"),
            "Parquet, the source": lambda: read_source("parquet", place / "1.parquet"),
        }
        speeds: dict[str, list[float]] = {}
        for _ in range(args.rounds):
            for name, reader in readers.items():
                start = time.perf_counter()
                rows = reader()
                speeds.setdefault(name, []).append(rows / (time.perf_counter() - start))
            for name, store in stores.items():
                rate = examples_per_second(store, 8192)
                speeds.setdefault(f"training batches from {name}", []).append(rate)
        for name, rates in speeds.items():
            print(f"{name}: {statistics.median(rates):,.0f} rows/s")


if __name__ == "__main__":
    main()
