"""TFRecord files of tf.Example are read as the records that they contain, or rejected."""

import gzip
import http.server
import importlib.resources
import json
import random
import struct

import numpy as np
import pyarrow as pa
import pytest
from raw import every_chunk
from servers import serving
from tfrecords import example, feature, field, framed, masked_crc, varint, write_file

from jaxrank.data.prepare.passes import prepare
from jaxrank.data.rejects import Rejects
from jaxrank.data.sources.registry import make_source
from jaxrank.data.sources.tfrecord import example_columns
from jaxrank.data.sources.tfrecord import source as tfrecord
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError, RunError

TYPES = {
    "i": "int64", "f": "float32", "b": "bytes",
    "is": "list<int64>", "fs": "list<float32>", "bs": "list<bytes>",
}  # fmt: skip
KINDS = {name: text.removeprefix("list<").removesuffix(">") for name, text in TYPES.items()}


def open_source(path, columns=None):
    more = {} if columns is None else {"columns": columns}
    return make_source(dict(kind="tfrecord", files=dict(train=str(path)), **more))


def read_rows(source, rejects=None):
    """Returns (row, {column: value}) of every record."""
    result = []
    for chunk in every_chunk(source, "train", rejects):
        result += zip(chunk.rows.tolist(), chunk.batch.to_pylist(), strict=True)
    return result


def single(number):
    return struct.unpack("<f", struct.pack("<f", number))[0]


def drawn_values(draw, kind, count):
    if kind == "bytes":
        return [draw.randbytes(draw.choice([0, 1, 5, 130])) for _ in range(count)]
    if kind == "float32":
        return [single(draw.uniform(-1e3, 1e3)) for _ in range(count)]
    edges = [0, 1, -1, 127, 128, 2**31, -(2**63), 2**63 - 1]
    return [draw.choice([*edges, draw.randrange(-(2**63), 2**63)]) for _ in range(count)]


def drawn_record(draw):
    """Returns the serialized record, and the expected columns."""
    features, expected = {}, {}
    names = list(TYPES)
    draw.shuffle(names)
    for name in names:
        is_list = TYPES[name].startswith("list")
        count = draw.choice([0, 1, 2, 7, 300 if draw.random() < 0.1 else 3]) if is_list else 1
        values = drawn_values(draw, KINDS[name], count)
        expected[name] = (values if is_list else values[0]) if values else None
        form = draw.random()
        if form < 0.1:
            expected[name] = None
        elif form < 0.15:
            expected[name], features[name] = None, b""
        elif form < 0.2:
            expected[name], features[name] = None, feature(KINDS[name], [])
        else:
            features[name] = feature(KINDS[name], values, packed=form < 0.9)
    if draw.random() < 0.3:
        features["a feature with a long name that nobody asked for"] = feature("int64", [1, 2])
    return example(features), {name: expected[name] for name in TYPES}


# Reading.


@pytest.mark.parametrize("count", [3, 1000])
def test_records_of_every_kind_form_and_order_are_read(tmp_path, monkeypatch, count):
    monkeypatch.setattr(tfrecord, "_RECORDS_PER_CHUNK", 150)
    draw = random.Random(count)
    drawn = [drawn_record(draw) for _ in range(count)]
    path = write_file(tmp_path / "a.tfrecord", [record for record, _ in drawn])
    source = open_source(path, TYPES)
    assert source.columns("train") == list(TYPES)
    assert read_rows(source) == [(i, expected) for i, (_, expected) in enumerate(drawn, start=1)]


def test_columns_have_the_types_that_were_asked_for(tmp_path):
    path = write_file(tmp_path / "a.tfrecord", [example({})])
    (chunk,) = every_chunk(open_source(path, TYPES), "train")
    numbers = {"int64": pa.int64(), "float32": pa.float32(), "bytes": pa.binary()}
    for name, kind in KINDS.items():
        expected = pa.list_(numbers[kind]) if TYPES[name].startswith("list") else numbers[kind]
        assert chunk.batch.schema.field(name).type == expected
        assert chunk.batch.column(name).to_pylist() == [None]


def test_names_that_share_beginnings_ends_and_lengths_are_distinguished(tmp_path):
    names = ["", "a", "b", "12345678", "12345679", "x12345678", "12345678_1_12345678"]
    names += ["12345678_2_12345678", "é", "e" * 200, "e" * 199]
    others = ["c", "a\0", "12345670", "x2345678", "e" * 198, "e" * 208]
    number = {name: i for i, name in enumerate(names + others)}
    draw = random.Random(5)
    records = []
    for i in range(100):
        some = [name for name in names if draw.random() < 0.8] + others
        draw.shuffle(some)
        records.append({name: i * 1000 + number[name] for name in some})
    path = write_file(
        tmp_path / "a.tfrecord",
        [example({n: feature("int64", [v]) for n, v in r.items()}) for r in records],
    )
    result = read_rows(open_source(path, dict.fromkeys(names, "int64")))
    assert result == [(i, {n: r.get(n) for n in names}) for i, r in enumerate(records, start=1)]


def test_the_last_of_two_features_of_one_name_holds_as_in_any_map(tmp_path):
    entry = [field(1, field(1, b"i") + field(2, feature("int64", [v]))) for v in (1, 2)]
    for count in (1, 100):  # decoded by protobuf and by NumPy
        path = write_file(tmp_path / "a.tfrecord", [field(1, b"".join(entry))] * count)
        assert read_rows(open_source(path, {"i": "int64"})) == [
            (i, {"i": 2}) for i in range(1, count + 1)
        ]


SEVEN = feature("int64", [7])
KEY, VALUE = field(1, b"i"), field(2, SEVEN)
TWO_PARTS = field(3, field(1, varint(7))) + field(3, field(1, varint(8)))
UNUSUAL = {
    "the value before the key": field(1, field(1, VALUE + KEY)),
    "an unknown field": field(9, b"x") + example({"i": SEVEN}),
    "an unknown field of features": field(1, field(2, KEY + b"x") + field(1, KEY + VALUE)),
    "an unknown field of an entry": field(1, field(1, KEY + VALUE + field(3, b"x"))),
    "an unknown field of a feature": example({"i": SEVEN + field(9, b"x")}),
    "features in two parts": example({"f": b""}) + example({"i": SEVEN}),
    "a long length": field(1, b"\x0a\x8a\x80\x80\x80\x80\x00" + KEY + VALUE),
    "values in two parts": example({"is": TWO_PARTS}),
    "a name that is not UTF-8": field(
        1, field(1, field(1, b"\xff") + VALUE) + field(1, KEY + VALUE)
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.parametrize("count", [1, 100])
def test_forms_that_protobuf_allows_and_nobody_writes_are_read(tmp_path, name, count):
    usual = example({"i": feature("int64", [1]), "is": feature("int64", [1])})
    records = [usual, UNUSUAL[name]] * count
    source = open_source(
        write_file(tmp_path / "a.tfrecord", records), {"i": "int64", "is": "list<int64>"}
    )
    parts = name == "values in two parts"
    expected = {"i": None if parts else 7, "is": [7, 8] if parts else None}
    assert [record for _, record in read_rows(source)] == [{"i": 1, "is": [1]}, expected] * count


def test_a_field_that_is_no_entry_leads_to_no_other_record(tmp_path):
    # The first record contains bytes in front of a position that could be read as a key.
    first = example({"": feature("int64", [3], packed=False)})
    assert first[:3] == b"\x0a" * 3
    other = field(1, field(2, KEY + b"xyz") + field(1, KEY + VALUE))
    records = [first] + [other] * 100
    result = read_rows(open_source(write_file(tmp_path / "a.tfrecord", records), {"i": "int64"}))
    assert [record["i"] for _, record in result] == [None] + [7] * 100


def test_gzip_is_read_by_its_content_whatever_the_name(tmp_path):
    records = [example({"i": feature("int64", [i])}) for i in range(100)]
    raw = b"".join(map(framed, records))
    path = tmp_path / "a.tfrecord"
    path.write_bytes(gzip.compress(raw[:1000]) + gzip.compress(raw[1000:]))
    assert read_rows(open_source(path)) == [(i + 1, {"i": i}) for i in range(100)]
    # A length that begins with the magic number of gzip.
    record = example({"b": feature("bytes", [bytes(0x088B1F - 23)])})
    assert struct.pack("<Q", len(record)).startswith(b"\x1f\x8b\x08")
    write_file(path, [record])
    assert read_rows(open_source(path))[0][1] == {"b": bytes(0x088B1F - 23)}


def test_a_file_that_tensorflow_wrote_is_framed(tmp_path):
    name = "python/testdata/morris_sequence_first_5.tfrecord"
    data = (importlib.resources.files("grain._src") / name).read_bytes()
    expected, at = [], 0
    while at < len(data):
        length = struct.unpack_from("<Q", data, at)[0]
        expected.append(data[at + 12 : at + 12 + length])
        at += 12 + length + 4
    assert len(expected) == 5
    path = tmp_path / "a.tfrecord"
    path.write_bytes(data)
    result = list(tfrecord.read_records(str(path)))
    assert [(r.row, r.data, r.intact) for r in result] == [
        (row, record, True) for row, record in enumerate(expected, start=1)
    ]


def test_chunks_end_at_their_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecord, "_BYTES_PER_CHUNK", 1000)
    monkeypatch.setattr(tfrecord, "_BYTES_AT_ONCE", 7)
    records = [example({"b": feature("bytes", [bytes([i]) * 300])}) for i in range(10)]
    source = open_source(write_file(tmp_path / "a.tfrecord", records))
    chunks = list(every_chunk(source, "train"))
    assert [chunk.batch.num_rows for chunk in chunks] == [4, 4, 2]
    assert [r["b"] for _, r in read_rows(source)] == [bytes([i]) * 300 for i in range(10)]


# Inference.


def test_types_are_those_of_the_first_records_of_the_first_file(tmp_path, monkeypatch):
    monkeypatch.setattr(tfrecord, "_INFERRED_FROM", 3)
    records = [
        example({"i": feature("int64", [1]), "fs": feature("bytes", []), "none": b""}),
        b"\xff no example",
        example({"fs": feature("float32", [1.5, 2.5]), "b": feature("bytes", [b"x"])}),
        example(
            {"i": feature("int64", [7]), "b": feature("int64", []), "late": feature("int64", [1])}
        ),
    ]
    path = write_file(tmp_path / "a.tfrecord", records)
    source = open_source(path)
    assert source.columns("train") == ["b", "fs", "i"]
    result = dict(read_rows(source, Rejects("skip", limit=1)))
    assert result == {
        1: {"b": None, "fs": None, "i": 1},
        3: {"b": b"x", "fs": [1.5, 2.5], "i": None},
        4: {"b": None, "fs": None, "i": 7},
    }


def test_two_kinds_of_one_feature_and_no_features_cannot_be_inferred(tmp_path):
    records = [example({"x": feature("int64", [1])}), example({"x": feature("float32", [1])})]
    path = write_file(tmp_path / "a.tfrecord", records)
    with pytest.raises(InputError, match=r"a\.tfrecord, column x: .* found int64 and float32"):
        open_source(path)
    write_file(tmp_path / "a.tfrecord", [b"\xff", example({})])
    with pytest.raises(InputError, match=r"a\.tfrecord: must begin with records of tf\.Example"):
        open_source(path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"i": "int32"},
            r"source\.columns\.i: must be one of 'bytes'.*'list<int64>'.*: found 'int32'",
        ),
        ({}, r"source\.columns: must be a dict with an entry: found \{\}"),
        (["i"], r"source\.columns: must be a dict"),
    ],
)
def test_columns_that_cannot_be_are_rejected(tmp_path, columns, message):
    path = write_file(tmp_path / "a.tfrecord", [example({})])
    with pytest.raises(InputError, match=message):
        open_source(path, columns)


# Invalid records.

GOOD = example({"i": feature("int64", [1]), "f": feature("float32", [0.5])})
BAD = {
    "values": (
        example({"i": feature("int64", [4, 5])}),
        "row {}, column i: must have one value or none: found 2 values. Set source.columns",
    ),
    "kind": (
        example({"f": feature("int64", [4])}),
        "row {}, column f: must be of kind float32: found int64.",
    ),
    "feature": (
        example({"i": b"\x1a\x05\x0a"}),
        "row {}, column i: must be a feature of a tf.Example: found 3 invalid bytes.",
    ),
    "texts": (
        example({"b": feature("bytes", [b"x", b"y"])}),
        "row {}, column b: must have one value or none: found 2 values. Set source.columns",
    ),
    "float": (
        example({"f": field(2, field(1, b"abc"))}),
        "row {}, column f: must be a feature of a tf.Example: found 7 invalid bytes.",
    ),
    # The entry claims 32 bytes, more than the record has left: it would end in the next record.
    "overrun": (
        field(1, b"\x0a\x20" + field(1, b"i") + b"\x12\x1b" + feature("int64", [4])),
        "row {}: must be a tf.Example: found 14 invalid bytes.",
    ),
    "example": (b"\x0a\x7fabc", "row {}: must be a tf.Example: found 5 invalid bytes."),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("count", [4, 60])
def test_bad_records_stop_or_are_skipped(tmp_path, name, count):
    bad, message = BAD[name]
    places = [count // 2, count]
    records = [bad if i in places else GOOD for i in range(1, count + 1)]
    types = {"i": "int64", "f": "float32", "b": "bytes"}
    source = open_source(write_file(tmp_path / "a.tfrecord", records), types)
    with pytest.raises(InputError) as caught:
        read_rows(source)
    assert f"a.tfrecord, {message.format(places[0])}" in str(caught.value)
    rejects = Rejects("skip", limit=2)
    result = read_rows(source, rejects)
    good = [i for i in range(1, count + 1) if i not in places]
    assert result == [(i, {"i": 1, "f": 0.5, "b": None}) for i in good]
    lines = [json.loads(line) for line in rejects.lines]
    assert [line["row"] for line in lines] == places
    if name == "values":
        assert lines[0]["record"] == {"i": [4, 5]}
    elif name not in ("texts", "kind"):
        assert lines[0]["record"] == bad.hex()


def test_int64_of_more_than_64_bits_is_no_feature(tmp_path):
    def packed(payload):
        return field(3, field(1, payload))

    largest = [(2**64 - 1, -1), (2**63, -(2**63)), (2**63 - 1, 2**63 - 1)]
    assert all(len(varint(number)) >= 9 for number, _ in largest)
    good = [example({"i": packed(varint(number))}) for number, _ in largest]
    longer = [b"\xff" * 10 + b"\x01", b"\x80" * 3]  # eleven bytes, and without an end
    for payload in longer:
        records = good * 20 + [example({"i": packed(payload)})]
        source = open_source(write_file(tmp_path / "a.tfrecord", records), {"i": "int64"})
        with pytest.raises(InputError, match="row 61, column i: must be a feature"):
            read_rows(source)
        result = [record["i"] for _, record in read_rows(source, Rejects("skip", limit=1))]
        assert result == [expected for _, expected in largest] * 20


# Damaged files.


def test_a_damaged_record_stops_or_is_skipped(tmp_path):
    frames = [framed(example({"i": feature("int64", [i])})) for i in range(5)]
    frames[3] = frames[3][:14] + bytes([frames[3][14] ^ 1]) + frames[3][15:]
    path = tmp_path / "a.tfrecord"
    path.write_bytes(b"".join(frames))
    source = open_source(path)
    with pytest.raises(InputError, match=r"a\.tfrecord, row 4: must have the CRC-32C"):
        read_rows(source)
    rejects = Rejects("skip", limit=1)
    assert read_rows(source, rejects) == [(i + 1, {"i": i}) for i in (0, 1, 2, 4)]
    assert json.loads(rejects.lines[0])["record"] == frames[3][12:-4].hex()
    with pytest.raises(InputError, match="at most 0 records may be skipped"):
        read_rows(source, Rejects("skip", limit=0))


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_nothing_behind_a_damaged_length_is_read(tmp_path, policy):
    frames = [framed(GOOD)] * 5
    frames[3] = b"\x01" + frames[3][1:]
    path = tmp_path / "a.tfrecord"
    path.write_bytes(b"".join(frames))
    with pytest.raises(InputError, match=r"a\.tfrecord, row 4: must begin with its length"):
        read_rows(open_source(path, TYPES), Rejects(policy, limit=10**6))
    path.write_text("label,price\n1,2.5\n")
    with pytest.raises(InputError, match=r"a\.tfrecord: must be TFRecord.*kind='csv'"):
        open_source(path)


@pytest.mark.parametrize("policy", ["error", "skip"])
def test_a_file_that_was_cut_is_rejected_wherever_it_was(tmp_path, policy):
    whole = framed(GOOD) * 3
    path = tmp_path / "a.tfrecord"
    each = len(whole) // 3
    for stop in range(each + 1, 2 * each):
        path.write_bytes(whole[:stop])
        with pytest.raises(InputError, match=r"a\.tfrecord, row 2: must be complete"):
            read_rows(open_source(path, TYPES), Rejects(policy, limit=10**6))
    packed = gzip.compress(whole)
    for stop in range(3, len(packed)):
        path.write_bytes(packed[:stop])
        with pytest.raises(InputError, match=r"a\.tfrecord"):
            read_rows(open_source(path, TYPES), Rejects(policy, limit=10**6))


def test_a_length_that_cannot_be_is_rejected_before_memory_is_asked_for(tmp_path):
    length = struct.pack("<Q", 2**62)
    path = tmp_path / "a.tfrecord"
    path.write_bytes(length + struct.pack("<I", masked_crc(length)) + b"x")
    with pytest.raises(InputError, match=r"row 1: must have at most 1,073,741,824 bytes"):
        open_source(path)


def test_a_file_without_records_is_rejected(tmp_path):
    path = tmp_path / "a.tfrecord"
    for content in (b"", gzip.compress(b"")):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"a\.tfrecord: must have at least one row"):
            open_source(path)


# The whole preparation.


def test_shards_without_records_are_passed_over_where_others_of_the_split_have_some(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(b"")
    (tmp_path / "b.tfrecord.gz").write_bytes(gzip.compress(b""))
    write_file(tmp_path / "c.tfrecord", [example({"n": feature("int64", [7])})])
    assert read_rows(open_source(tmp_path)) == [(1, {"n": 7})]
    (tmp_path / "c.tfrecord").unlink()
    with pytest.raises(InputError, match="must have at least one row: found none"):
        open_source(tmp_path)


def test_a_column_that_is_missed_or_no_list_names_the_field_with_the_types(tmp_path):
    record = {"click": feature("int64", [1]), "h": feature("int64", [5])}
    path = write_file(tmp_path / "a.tfrecord", [example(record)])
    source = dict(kind="tfrecord", files=dict(train=path))
    features = dict(tasks=[dict(name="click", label="click")], ragged=[dict(columns="h")])
    with pytest.raises(InputError, match=r"int64\. .*source\.columns\['h'\]='list<int64>'\.$"):
        prepare(features, source, tmp_path / "store")
    features["ragged"] = [dict(columns="late")]
    with pytest.raises(InputError, match=r"first 1,000 records of .*a\.tfrecord: set source\.col"):
        prepare(features, source, tmp_path / "store")


def test_prepared_tfrecords_are_the_store_of_the_same_csv(tmp_path):
    draw = random.Random(11)
    lines, records = ["label,price,user,tags"], []
    for _ in range(300):
        price, tags = (
            draw.randrange(100) / 4,
            [f"t{draw.randrange(9)}" for _ in range(draw.randrange(4))],
        )
        label, user = draw.randrange(2), f"u{draw.randrange(40)}"
        lines.append(f"{label},{price},{user},{'|'.join(tags)}")
        records.append(
            example(
                {
                    "label": feature("int64", [label]),
                    "price": feature("float32", [price]),
                    "user": feature("bytes", [user.encode()]),
                    "tags": feature("bytes", [tag.encode() for tag in tags]),
                }
            )
        )
    (tmp_path / "a.csv").write_text("\n".join(lines))
    write_file(tmp_path / "a.tfrecord", records)
    features = dict(
        tasks=[dict(name="click", label="label")],
        dense=[dict(columns="price", standardize=True)],
        categorical=[dict(columns="user", min_count=2)],
        ragged=[dict(columns="tags")],
    )
    stores = {}
    for kind, name in (("csv", "a.csv"), ("tfrecord", "a.tfrecord")):
        source = dict(kind=kind, files=dict(train=str(tmp_path / name)))
        prepare(features, source, tmp_path / kind, report=lambda _: None)
        stores[kind] = open_store(tmp_path / kind)
    assert stores["csv"].schema == stores["tfrecord"].schema
    blocks = [list(store.split("train").blocks()) for store in stores.values()]
    for block, other in zip(*blocks, strict=True):
        for field_name in ("dense", "ids", "list_lengths", "list_values", "labels"):
            np.testing.assert_array_equal(getattr(block, field_name), getattr(other, field_name))


def test_numpy_and_protobuf_read_the_same(monkeypatch):
    draw = random.Random(2)
    records = [drawn_record(draw)[0] for _ in range(500)]
    types = {name: tfrecord.ColumnType.parse(text) for name, text in TYPES.items()}
    by_numpy, bad = example_columns.decode_columns(records, types)
    monkeypatch.setattr(example_columns, "_FEW", 10**9)
    by_protobuf, same_bad = example_columns.decode_columns(records, types)
    assert by_numpy.equals(by_protobuf)
    assert bad == same_bad == []


class Breaks(http.server.SimpleHTTPRequestHandler):
    """Sends fewer bytes than announced."""

    def send_header(self, keyword, value):
        super().send_header(keyword, int(value) + 10 if keyword == "Content-Length" else value)


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_files_of_a_web_server_are_read_as_local_ones(tmp_path, pack):
    data = [b"first", b"second" * 1000]
    (tmp_path / "a.tfrecord").write_bytes(pack(b"".join(map(framed, data))))
    with serving(tmp_path) as url:
        assert [record.data for record in tfrecord.read_records(f"{url}/a.tfrecord")] == data
    with (
        serving(tmp_path, Breaks) as url,
        pytest.raises(RunError, match="a.tfrecord: could not be read: Response payload is not"),
    ):
        list(tfrecord.read_records(f"{url}/a.tfrecord"))
