"""Reads damaged Parquet and TFRecord files in a separate process, which a reader may crash.

    python tests/helpers/mutations.py KIND FIRST COUNT DIRECTORY

Prints the number of each case before it, and finally the numbers of files read and rejected.
"""

import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tfrecords import example, feature, framed

from jaxrank.data.rejects import Rejects
from jaxrank.data.sources.registry import make_source
from jaxrank.errors import InputError


def mutated(data, draw, places=None):
    """Changes a few bytes. In a third of the cases also removes, inserts or truncates some.

    places: if given, bytes are only changed, and only at these positions.
    """
    out = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        place = draw.choice(places) if places else draw.randrange(len(out))
        out[place] = draw.choice([out[place] ^ 1 << draw.randrange(8), draw.randrange(256), 0, 255])
    if places is None and draw.random() < 1 / 3:
        start = draw.randrange(len(out))
        stop = min(len(out), start + draw.choice([1, 4, 50]))
        how = draw.randrange(3)
        if how == 0:
            del out[start:stop]
        elif how == 1:
            out[start:start] = draw.randbytes(stop - start)
        else:
            del out[start:]
    return bytes(out)


def page_bytes(path):
    """Returns the positions of all bytes in the pages of a Parquet file, which checksums cover."""
    data, metadata = Path(path).read_bytes(), pq.read_metadata(path)
    result = []
    for group in range(metadata.num_row_groups):
        for column in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(column)
            at = chunk.dictionary_page_offset or chunk.data_page_offset
            stop = at + chunk.total_compressed_size
            while at < stop:
                header, at = _thrift_struct(data, at)
                size = header[3]  # compressed_page_size
                result += range(at, at + size)
                at += size
    return result


def _thrift_struct(data, at):
    """Parses a struct in Thrift's compact protocol: {field: value} and its end."""
    fields, last = {}, 0
    while data[at]:
        step, kind = data[at] >> 4, data[at] & 15
        at += 1
        if step:
            last += step
        else:
            last, at = _zigzag(data, at)
        fields[last], at = _thrift_value(data, at, kind)
    return fields, at + 1


def _thrift_value(data, at, kind):
    if kind in (1, 2):
        return kind == 1, at
    if kind in (4, 5, 6):
        return _zigzag(data, at)
    if kind == 8:
        size, at = _varint(data, at)
        return data[at : at + size], at + size
    assert kind == 12, f"no page header has a field of Thrift type {kind}"
    return _thrift_struct(data, at)


def _varint(data, at):
    value = shift = 0
    while data[at] > 127:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
    return value | data[at] << shift, at + 1


def _zigzag(data, at):
    value, at = _varint(data, at)
    return value >> 1 ^ -(value & 1), at


def parquet_file(path, seed, rows=60):
    """Writes a small file with checksums of its pages, and returns its records."""
    draw = random.Random(seed)

    def some(value):
        return None if draw.random() < 0.1 else value

    table = pa.table(
        {
            "label": pa.array([draw.randrange(2) for _ in range(rows)], pa.int8()),
            "price": pa.array([some(draw.gauss(0, 1)) for _ in range(rows)]),
            "user": pa.array([some(f"u{draw.randrange(9)}") for _ in range(rows)]),
            "tags": pa.array(
                [some([draw.randrange(2**40)] * draw.randrange(4)) for _ in range(rows)],
                pa.list_(pa.int64()),
            ),
        }
    )
    pq.write_table(
        table,
        path,
        row_group_size=25,
        write_page_checksum=True,
        compression=draw.choice(["none", "snappy", "zstd", "gzip"]),
        data_page_version=draw.choice(["1.0", "2.0"]),
        use_dictionary=draw.random() < 0.5,
        write_statistics=draw.random() < 0.5,
        store_schema=draw.random() < 0.5,
    )
    return table.to_pylist()


def tfrecord_file(path, seed, rows=60):
    """Writes a small file, and returns its records."""
    draw = random.Random(seed)
    records = []
    for _ in range(rows):
        tags = [draw.randrange(2**40) for _ in range(draw.randrange(4))]
        records.append(
            {"label": draw.randrange(2), "user": b"u%d" % draw.randrange(9), "tags": tags or None}
        )
    frames = [
        framed(
            example(
                {
                    "label": feature("int64", [record["label"]]),
                    "user": feature("bytes", [record["user"]]),
                    "tags": feature("int64", record["tags"] or []),
                }
            )
        )
        for record in records
    ]
    Path(path).write_bytes(b"".join(frames))
    return records


COLUMNS = {"tfrecord": {"label": "int64", "user": "bytes", "tags": "list<int64>"}}
WRITERS = {"parquet": parquet_file, "tfrecord": tfrecord_file}


def read(kind, path, rejects=None):
    """Reads {row: record} of a file that may be rejected."""
    more = {"columns": COLUMNS[kind]} if kind in COLUMNS else {}
    source = make_source(dict(kind=kind, files=dict(train=str(path)), **more))
    result = {}
    for part in source.parts("train"):
        for chunk in source.chunks(part, rejects or Rejects()):
            result |= zip(chunk.rows.tolist(), chunk.batch.to_pylist(), strict=True)
    return result


def check(kind, seed, directory):
    """Returns True if a damaged file was read. Raises all but an InputError that names the file."""
    path = Path(directory) / f"a.{kind}"
    WRITERS[kind](path, seed // 20)  # several damages per file
    draw = random.Random(seed)
    whole = path.read_bytes()
    places = None
    if kind == "parquet" and draw.random() < 0.7:  # most bytes are in pages, and soon rejected
        places = sorted(set(range(len(whole))) - set(page_bytes(path)))
    path.write_bytes(mutated(whole, draw, places))
    try:
        read(kind, path, Rejects(draw.choice(["error", "skip"]), limit=1000))
    except InputError as error:
        if str(path) not in str(error):
            raise
        return False
    return True


def main(kind, first, count, directory):
    whole = 0
    for seed in range(int(first), int(first) + int(count)):
        print(seed, flush=True)
        whole += check(kind, seed, directory)
    print(f"read {whole}, rejected {int(count) - whole}")


if __name__ == "__main__":
    main(*sys.argv[1:])
