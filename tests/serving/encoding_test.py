"""The scorer's encoding of raw values equals that of the preparation, on edge values."""

import random
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from jaxrank_serving.encoder import Encoder
from jaxrank_serving.errors import RequestError
from jaxrank_serving.index import Index
from jaxrank_serving.sequences import sequence_lists
from jaxrank_serving.signature import Column, Events, Ragged, parse
from jaxrank_serving.values import Cells

from jaxrank import json_files, layout
from jaxrank.data.chunk import Chunk, numbered
from jaxrank.data.encode.encoder import Encoder as Preparation
from jaxrank.data.rejects import Rejects
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.resolve import build_schema, resolve
from jaxrank.data.statistics.split import Statistics
from jaxrank.data.statistics.vocabulary import Vocabulary
from jaxrank.errors import InputError
from jaxrank.export.signature import Requests, signature, stacks
from jaxrank.export.vocabulary_index import write_index
from jaxrank.features import PAD

WORDS = ["a", "36", "36.0", "007", "-0", "1", "0", "é", "a|b", "[1, 2]", "true", "x", "-5", "12"]
WORDS += ["16777215", "9007199254740991", "+5", " 1", "[b]", "'b'", "nul\0inside"]
TEXTS = [*WORDS, None, "", "1 ", "0x10", "-1", "nan", "inf", "-inf", "1e5", "1e400", "1_0", "."]
TEXTS += ["9223372036854775807", "9223372036854775808", "-9223372036854775809", "0" * 30 + "5"]
TEXTS += ["5.", ".5", "1e151", "1e-50", "3.5e38", "a||b", "|", "a|b|c", "1|2", "0|-1|2", "1|0|"]
TEXTS += ["['a', 'x']", '["a", 1.0]', "[a, b]", "(1, 2)", "{1, 2}", "array([1, 2])", "'a', 'b'"]
TEXTS += ["[]", "[[1], [2]]", "(a)|(b)", "a[1]", "[true]", "[1,", "12:0.5|a:2", "a:0", "a:", ":1"]
TEXTS += ["a:b:0.25", "a:nan", "a:-1", "a:1e-39", "0|a:1", "x:1|x:1|x:1", "15", "-15", "14", "40"]
ALPHABET = "01259-+.eE|,:[]()'\"ax é_"
INTEGERS = [None, 0, 1, -1, 5, 36, 14, 15, 40, 127]
LARGE = [2**31 - 1, 2**53, 2**63 - 1, -(2**63)]
FLOATS = [None, 0.0, -0.0, 1.0, 36.0, 0.5, 14.0, 15.0, -5.0, float("nan"), float("inf"), 2047.0]
FLOATS += [2048.0, 0.1]
WIDE = [2.0**24 - 1, 2.0**24, 2.0**53, 2.0**53 - 1, 1e20, -1e20, 2.0**63, 1e151, 3e38]
BYTES = [b"[1, 2]", b"1|2", b"a:0.5|0:1", b"[3]", b"0"]
COLUMNS = {
    "text": (pa.string(), TEXTS),
    "int8": (pa.int8(), INTEGERS),
    "int64": (pa.int64(), INTEGERS + LARGE),
    "uint64": (pa.uint64(), [None, 0, 14, 15, 2**63, 2**64 - 1]),
    "float16": (pa.float16(), [None if v is None else np.float16(v) for v in FLOATS]),
    "float32": (pa.float32(), FLOATS + WIDE[:5] + WIDE[-1:]),
    "float64": (pa.float64(), FLOATS + WIDE),
    "bool": (pa.bool_(), [None, True, False]),
    "binary": (pa.binary(), [None, b"", b"a", b"36", b"\xff", "é".encode(), *BYTES]),
    "list of binary": (pa.list_(pa.binary()), [None, [], [b"a", b""], [b"a:0.5"], [b"\xff"]]),
    "list of int64": (pa.list_(pa.int64()), [None, [], [1, 36], [0, 5, -1], [None, 1], [15, 14]]),
    "list of text": (
        pa.list_(pa.string()),
        [None, [], ["a", "x"], ["a", None], ["", "a"], ["36", "0", "b"], ["0", "-1"]]
        + [["[1", "2]"], ["a", "[1, 2]"], ["(a", "b", "x)"], ["[b]", "a"], ["[1", "2"]],
    ),
    "list of float64": (
        pa.list_(pa.float64()),
        [None, [], [1.0, 36.0], [0.5, 1.0], [float("nan"), 1.0], [None, 2.0], [-1.0, 0.0, 5.0]],
    ),
    "list of float32": (pa.list_(pa.float32()), [[1.0, 2.0**24], [0.1, 0.5], [3e38, 1.0]]),
}
INTEGER = dict(encoding="integer", rows=15)
ENTRIES = {
    "dense": dict(dense={}),
    "log and indicator": dict(dense=dict(log=True, missing_indicator=True)),
    "standardised": dict(dense=dict(standardize=True)),
    "vector": dict(dense=dict(length=2, separator="|")),
    "vocabulary": dict(categorical={}),
    "hash": dict(categorical=dict(encoding="hash", rows=20, salt="s")),
    "bucket": dict(categorical=dict(encoding="bucket", boundaries=[-1.0, 0.1, 0.5, 36.0])),
    **{
        f"integer, {policy}": dict(categorical=dict(on_bad_id=policy, **INTEGER))
        for policy in ("error", "oov", "hash", "clip")
    },
    **{
        f"two ids, {brackets}": dict(
            categorical=dict(length=2, separator="|", brackets=brackets, encoding="hash", rows=30)
        )
        for brackets in ("error", "read", "keep")
    },
    "two row numbers": dict(categorical=dict(length=2, separator="|", on_bad_id="oov", **INTEGER)),
    "list": dict(ragged={}),
    "list in brackets": dict(ragged=dict(brackets="read")),
    "list with brackets": dict(ragged=dict(brackets="keep")),
    "list with padding": dict(ragged=dict(padding=["", "0", "-1", "nan"])),
    "first ids": dict(ragged=dict(max_length=2, on_overlong="truncate")),
    "last ids": dict(
        ragged=dict(max_length=2, on_overlong="truncate", keep="last", combiner="sqrtn")
    ),
    "at most two ids": dict(ragged=dict(max_length=2, combiner="sum")),
    "sequence": dict(ragged=dict(combiner="none", max_length=2, on_overlong="truncate")),
    "ids with weights": dict(ragged=dict(weight_separator=":", padding=["0"])),
    "parallel weights": dict(ragged=dict(weights="w", combiner="sqrtn", padding=["0"])),
    "list of row numbers": dict(ragged=dict(on_bad_id="clip", padding=["-1"], **INTEGER)),
}


def built(entry, names, types, folder):
    """Returns the preparation's encoder and the scorer's, and the stack of their only table."""
    ((section, fields),) = entry.items()
    tree = dict(tasks=[dict(name="t", label="t")]) | {section: [dict(columns="x", **fields)]}
    return build_encoder(tree, names, types, folder)


def build_encoder(section, names, types, folder):
    """Returns both encoders of a section `features`, and the signature."""
    spec = resolve(FeatureSpec.from_state(section), names)
    words = pa.array(WORDS)
    counted = Vocabulary(words, np.ones(len(words)))
    vocabularies = {t.name: counted for t in spec.tables if t.encoding == "vocabulary"}
    transforms = {f.name: (1.5, 2.5) for f in spec.dense}
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    rows = {name: v.rows for name, v in vocabularies.items()}
    schema = build_schema(spec, rows, {}, transforms)
    tables = layout.layout(schema, {t.name: 4 for t in schema.tables})
    index = write_index(
        [(name, pa.chunked_array([words])) for name in vocabularies], folder / "i", scratch
    )
    store = SimpleNamespace(spec=SimpleNamespace(source={}, boundaries={}, hash_key=""))
    tree = signature(tables, store, spec, types, Requests())
    tree |= stacks(tables, spec, index.seeds, "float32")
    tree["statistics"] = dict(split="valid", rows=None, scored_rows=None, tasks=[], features=[])
    tree |= dict(
        outputs=[], calibration=None, origin={}, model=dict(onnx="", stablehlo="", inputs=[])
    )
    tree["index"] = dict(file="i", values=index.values, bits=index.bits, steps=index.steps)
    parsed = parse(json_files.plain(tree))
    features = spec.without_labels()
    preparation = Preparation(features, vocabularies, transforms, Statistics(features))
    return preparation, Encoder(parsed, Index(folder / "i", parsed.index)), parsed


def prepared(preparation, batch):
    """Returns {row: its encoding} of the rows that the preparation accepts. None: it refuses the
    type of the column.
    """
    chunk = Chunk(batch, "file", numbered(0, batch.num_rows))
    try:
        chunk, examples = Rejects("skip", limit=10**6).attempt(chunk, preparation.encode)
    except InputError as error:
        if "found a column of type" not in str(error):
            raise
        return None
    if examples is None:
        return {}
    ends = np.concatenate([[0], np.cumsum(examples.list_lengths.reshape(-1))])
    weights = examples.list_weights
    result = {}
    for i, row in enumerate(chunk.rows.tolist()):
        part = slice(*ends[[i, i + 1]]) if examples.list_lengths.size else slice(0, 0)
        list_weights = None if weights is None else weights[part]
        result[row] = examples.dense[i], examples.ids[i], examples.list_values[part], list_weights
    return result


def scored(encoder, parsed, batch, row):
    """Returns the encoding of one row as the preparation has it, or None if it is rejected."""
    columns = {c.name: c for c in parsed.columns}
    cells = {
        name: Cells([batch.column(name)[row].as_py()], column, False)
        for name, column in columns.items()
    }
    try:
        features = encoder.encode(cells, 1)
    except RequestError:
        return None
    zeros = parsed.stacks[0].rows if parsed.stacks else 0

    def table_rows(rows):
        return np.where(rows == zeros, PAD, rows).astype(np.int32)

    ids = table_rows(features.ids["x"][0]) if features.ids else np.zeros(0, np.int32)
    rows, _, factors = features.lists.get("x", (np.zeros(0, np.int64), None, None))
    return features.dense[0], ids, table_rows(rows), factors


@pytest.mark.parametrize("name", ENTRIES)
def test_the_scorer_encodes_edge_values_as_the_preparation_does(name, tmp_path):
    entry = ENTRIES[name]
    r = random.Random(name)
    accepted = rejected = 0
    for kind, (type_, values) in COLUMNS.items():
        if kind == "text":
            drawn = ["".join(r.choices(ALPHABET, k=r.randint(1, 8))) for _ in range(300)]
            values = values + drawn
        columns = {"x": pa.array(values, type_), "t": pa.nulls(len(values), pa.float64())}
        if name == "parallel weights":
            lengths = [len(v) if isinstance(v, list) else str(v).count("|") + 1 for v in values]
            columns["w"] = pa.array(
                [r.choice([["0.5"] * n, ["1e-39"], ["0"] * n, ["2"] * n]) for n in lengths],
                pa.list_(pa.string()),
            )
        batch = pa.RecordBatch.from_pydict(columns)
        preparation, encoder, parsed = built(entry, batch.schema.names, batch.schema, tmp_path)
        expected = prepared(preparation, batch)
        if expected is None:
            continue
        for row in range(batch.num_rows):
            actual, value = scored(encoder, parsed, batch, row), batch.column("x")[row].as_py()
            assert (row in expected) == (actual is not None), (kind, value)
            if actual is None:
                rejected += 1
                continue
            accepted += 1
            for a, b in zip(actual[:3], expected[row][:3], strict=True):
                np.testing.assert_array_equal(a, b, err_msg=f"{kind} {value!r}")
            check_factors(parsed, actual[3], expected[row][3], (kind, value))
    assert accepted > 10
    assert rejected > 2


def check_factors(parsed, factors, weights, where):
    """Compares the factors of ids with the factors of the combiner, from the stored weights."""
    if not parsed.ragged or factors is None:
        return
    w = np.ones(len(factors)) if weights is None else weights.astype(np.float64)
    combiner = parsed.ragged[0].combiner
    norm = {"mean": w.sum(), "sqrtn": np.sqrt((w**2).sum())}.get(combiner, 1.0)
    np.testing.assert_allclose(factors, w / max(norm, 1e-38), rtol=1e-6, err_msg=str(where))


def test_candidates_are_encoded_together_as_they_are_alone(tmp_path):
    """Columns of one request have values of several types, and one is of the context."""
    columns = dict(
        x=["a", "36", "", None, "x", 36, "é", "nul\0inside"],
        y=["36", "1", None, "never", "", "0", "1", "36"],
        z=["5", "1e3", "", None, 7, 2.5, "-0", "5"],
        shared=["36"] * 8,
        number=[4.0] * 8,
    )
    texts = {name: list(map(str, values)) for name, values in columns.items()}
    batch = pa.RecordBatch.from_pydict(texts | {"t": ["1"] * 8})
    section = dict(
        tasks=[dict(name="t", label="t")],
        dense=[dict(columns=["z", "number"], missing_indicator=True)],
        categorical=[dict(columns=["x", "y", "shared"])],
    )
    _, encoder, parsed = build_encoder(section, batch.schema.names, batch.schema, tmp_path)
    by_name = {c.name: c for c in parsed.columns}
    shared = {n: Cells([columns[n][0]], by_name[n], True) for n in ("shared", "number")}
    cells = {n: Cells(columns[n], by_name[n], False) for n in "xyz"}
    together = encoder.encode(cells | shared, 8)
    summed = np.zeros_like(together.counts)
    for row in range(8):
        alone = {n: Cells([columns[n][row]], by_name[n], False) for n in "xyz"}
        single = encoder.encode(alone | shared, 1)
        np.testing.assert_array_equal(together.dense[row], single.dense[0])
        for name, ids in together.ids.items():
            np.testing.assert_array_equal(ids[min(row, len(ids) - 1)], single.ids[name][0])
        summed += single.counts
    counts = dict(zip(encoder.names, together.counts.tolist(), strict=True))
    totals = dict(zip(encoder.names, summed.tolist(), strict=True))
    assert all(counts[name] == totals[name] for name in "xyz")
    assert counts["x"][:3] == [8, 2, 0]
    assert counts["y"][:3] == [8, 2, 1]
    assert counts["z"][:3] == [8, 2, 0]
    assert counts["shared"][0] == counts["number"][0] == 1
    bad = cells | {"y": cells["y"]._replace(values=["36", None, "", "[1, 2]", *columns["y"][4:]])}
    with pytest.raises(RequestError, match=r"y: must be one id, not a list in brackets: .*1, 2"):
        encoder.encode(bad | shared, 8)


MEANINGS = {
    "text": [(36, "36"), ("36.0", "36.0"), (36.0, "36.0"), ("36", "36"), (True, None)],
    "int64": [(36, "36"), ("36.0", "36"), (36.0, "36"), (True, "1"), ("true", None), (36.5, None)],
    "float64": [(36, "36"), ("36.0", "36"), (True, "1"), (2**53, None), (0.5, None)],
    "bool": [(True, "1"), ("true", "1"), ("False", "0"), (0, "0"), (36, None), ("36", None)],
}


@pytest.mark.parametrize("value", [36, "36", 2, "2", 0.5, "0.5"])
def test_a_number_is_no_boolean(value):
    from jaxrank_serving.signature import Column
    from jaxrank_serving.values import numbers

    column = Column("x", "bool", False, "any", True, None, False)
    assert list(numbers(Cells([True, "false", 1, "0"], column, True))) == [1, 0, 1, 0]
    with pytest.raises(RequestError, match="context, x: must be a finite number or empty: found"):
        numbers(Cells([value], column, True))


@pytest.mark.parametrize("kind", MEANINGS)
def test_json_values_mean_what_the_trained_column_makes_of_them(kind):
    from jaxrank_serving.signature import Column
    from jaxrank_serving.values import texts

    column = Column("x", kind, False, "any", True, None, False)
    for value, expected in MEANINGS[kind]:
        cells = Cells([value], column, True)
        if expected is None:
            with pytest.raises(RequestError, match="context, x: must be text or a whole"):
                texts(cells)
        else:
            assert texts(cells) == [expected], value
    with pytest.raises(RequestError):
        texts(Cells([{}], column, True))


@pytest.mark.parametrize("is_context", [True, False])
def test_the_age_alone_of_a_sequence_is_read(is_context):
    age = Ragged("past/age", "", "integer", "|", "", (), "", "", "none", 2, "truncate", "first", "")
    sequence = Events("past", ("past/age",), "newest_first", "when", "now", "past/age")
    columns = {
        name: Cells(
            [value], Column(name, kind, name == "when", "any", True, None, False), is_context
        )
        for name, kind, value in (("when", "int64", [99, 96, 80]), ("now", "int64", 100))
    }
    lists = sequence_lists(sequence, [age], columns, "seconds")["past/age"]
    assert list(lists.ids.values) == [1, 2]
    assert lists.ids.is_context == is_context
