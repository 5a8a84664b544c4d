"""Cells with lists, in every spelling that logs have, compared with the expected ids."""

import numpy as np
import pyarrow as pa
import pytest

from jaxrank.data.chunk import Chunk, numbered
from jaxrank.data.encode import cells
from jaxrank.data.encode.encoder import raw_floats
from jaxrank.data.rejects import BadRows
from jaxrank.data.spec.entries import CategoricalSpec, DenseSpec, RaggedSpec
from jaxrank.errors import InputError


def make_chunk(**columns):
    batch = pa.RecordBatch.from_pydict({k: pa.array(v) for k, v in columns.items()})
    return Chunk(batch, "day.csv", numbered(2, batch.num_rows))


def lists(values, **settings):
    """Returns the ids of each cell, and their weights if there are any."""
    result = cells.list_elements(RaggedSpec(("h",), **settings), make_chunk(h=values))
    ends = np.cumsum(result.ids.lengths).tolist()
    bounds = list(zip([0, *ends], ends, strict=False))
    ids = result.ids.values.to_pylist()
    by_cell = [ids[a:b] for a, b in bounds]
    return by_cell if result.weights is None else (by_cell, result.weights.tolist())


BRACKETS = [
    ("[1, 2]", ["1", "2"]),
    ("[8]", ["8"]),
    ("[]", []),
    ("[ ]", []),
    ('["x","y"]', ["x", "y"]),
    ("['a', 'b']", ["a", "b"]),
    ("(1, 2)", ["1", "2"]),
    ("(1,)", ["1"]),
    ("{3, 4}", ["3", "4"]),
    ("[1 2  3]", ["1", "2", "3"]),
    ("[a, b c]", ["a", "b c"]),
    ("'a','b'", ["a", "b"]),
    ('"a,b"', ["a,b"]),
    ("['a,b', 'c']", ["a,b", "c"]),
    (' [1, 2] ', ["1", "2"]),
    ('["caf\\u00e9"]', ["café"]),
    ("array([1, 2])", ["1", "2"]),
    ("{}", []),
    ('{"a b",c}', ["a b", "c"]),
    ("List(a, b)", ["a", "b"]),
    ("WrappedArray(1)", ["1"]),
    ("deque([1, 2], maxlen=5)", ["1", "2"]),
    ("tensor([1,\n 2])", ["1", "2"]),
    ("dict_values([1])", ["1"]),
    ("np.array([1 2])", ["1", "2"]),
    ("ListBuffer(1, 2)", ["1", "2"]),
    ("ARRAY[1,2]", ["1", "2"]),
    ("vec![1, 2]", ["1", "2"]),
    ("<1,2>", ["1", "2"]),
    ("array<1,2>", ["1", "2"]),
    ("u'a',u'b'", ["a", "b"]),
    ("[4.]", ["4."]),
    ("[3. 4.]", ["3.", "4."]),
    ("(1.50, 2)", ["1.50", "2"]),
    ('"[1, 2]"', ["1", "2"]),
    ("'[\"a\"]'", ["a"]),
    ('"[x]"', ["[x]"]),
    ("[1.0, 4873214862074861568, 4873214862074861569.0]",
     ["1.0", "4873214862074861568", "4873214862074861569.0"]),
]  # fmt: skip


@pytest.mark.parametrize(("cell", "ids"), BRACKETS)
@pytest.mark.parametrize("separator", [",", "|", ", "])
@pytest.mark.parametrize("kind", [pa.string(), pa.binary()], ids=str)
def test_a_list_in_brackets_is_rejected_or_read_as_asked_and_never_ids_with_brackets(
    cell, ids, separator, kind
):
    def lists_of(values, **settings):
        return lists(pa.array(values).cast(kind), separator=separator, **settings)

    with pytest.raises(BadRows, match=r"row 3, column h: must be .*not in brackets or quotes"):
        lists_of(["7", cell])
    plain = separator.join(["7", "9"])
    result = lists_of([plain, cell, None], brackets="read")
    assert result == [["7", "9"], ids, []]
    assert lists_of([cell], brackets="keep") == [cell.split(separator)]


@pytest.mark.parametrize(
    "cell",
    [
        *("[[1, 2], [3]]", "[true, 1]", '[{"a": 1}]', "((1, 2), 3)", "{1: 0.5}"),
        *("[1, 2", "1, 2]", "[1, 2)", "['a', 1e20]", "b'a',b'c'", "b'a'", "'a';'b'", "[1|2, 3]"),
        *("[1 2 ... 8 9]", "[a, b, ..., z]", "[1, 2, \u2026, 9]", "\"{'a': 1}\""),
        *("tensor([[1, 2], [3]])", "[np.int64(1), np.int64(2)]", "Counter({1: 2})"),
    ],
)
def test_brackets_that_hold_more_than_ids_are_rejected(cell):
    with pytest.raises(BadRows, match="row 2, column h: must be a list of ids or numbers in brac"):
        lists([cell], brackets="read")


@pytest.mark.parametrize("separator", ["|", ";", "||"])
@pytest.mark.parametrize("form", ["[{}]", "({})", "List({})", " {{{}}} ", "[ {} ]"])
def test_ids_in_brackets_may_be_between_the_separator_of_the_feature(form, separator):
    settings = dict(separator=separator, brackets="read")
    cells = [form.format(separator.join(ids)) for ids in ("123", "4", ["'a'", '"b c"'])]
    assert lists(cells, **settings) == [["1", "2", "3"], ["4"], ["a", "b c"]]


@pytest.mark.parametrize(
    ("cell", "brackets"),
    [
        ("(12,0.5)|(13,2)", "error"),
        ("[4]|[5]", "error"),
        ("a|['b']", "read"),
        ('["[1", "2]"]', "read"),
        ('["[1, 2]", "3"]', "read"),
    ],
)
def test_brackets_of_lists_in_the_parts_of_a_text_are_rejected(cell, brackets):
    with pytest.raises(BadRows, match="row 3, column h: .*no brackets of a list: found"):
        lists(["(a)|:)|(none)", cell], brackets=brackets)
    assert lists([cell], brackets="keep") == [cell.split("|")]


@pytest.mark.parametrize("brackets", ["error", "read"])
@pytest.mark.parametrize("parts", [["[1", "2]"], ["{a", "b", "c}"], ["[4]"], ["7", "(1, 2)"]])
def test_brackets_of_lists_in_the_parts_of_a_list_are_rejected(parts, brackets):
    kept = [["(none)", ":)"], [":(", "a)"], ["[x", "y"], ["[deleted]"], []]
    assert lists(kept, brackets=brackets) == kept
    with pytest.raises(BadRows, match="row 3, column h: .*no brackets of a list: found"):
        lists([["a"], parts], brackets=brackets)
    assert lists([parts], brackets="keep") == [parts]


@pytest.mark.parametrize(
    "cell",
    ["(a)|(b)", "a[1]|b", ":)|b", "Alien(1979)", "it's|o'clock", "<unk>|<pad>", "f(a),g(b)|c"],
)
def test_brackets_that_are_parts_of_ids_are_left_there(cell):
    assert lists([cell]) == [cell.split("|")]


@pytest.mark.parametrize("cell", ["[1, 2]", "[8]", "(7,)", "['a']", "List(7)", "ARRAY[1,2]", "{}"])
def test_a_list_in_a_column_of_single_ids_is_rejected(cell):
    ids = CategoricalSpec(("h",))
    kept = [
        "a",
        "(not set)",
        "{3F25-4F89}",
        "<unk>",
        "[deleted]",
        "(500) Days",
        "Alien(1979)",
        None,
    ]
    assert cells.id_elements(ids, make_chunk(h=kept)).values.to_pylist() == kept
    with pytest.raises(BadRows, match=r"row 3, column h: must be one id, not a list in brackets"):
        cells.id_elements(ids, make_chunk(h=["a", cell]))
    with pytest.raises(BadRows, match=r"row 3, column h: must be one id, not a list in brackets"):
        cells.id_elements(ids, make_chunk(h=[b"a", cell.encode()]))
    kept = CategoricalSpec(("h",), brackets="keep")
    assert cells.id_elements(kept, make_chunk(h=[cell])).values.to_pylist() == [cell]


def test_a_fixed_number_of_ids_may_be_in_brackets_too():
    entry = CategoricalSpec(("h",), length=2, separator=",", brackets="read")
    assert cells.id_elements(entry, make_chunk(h=["[4, 5]", "6,7"])).values.to_pylist() == [
        "4", "5", "6", "7",
    ]  # fmt: skip
    with pytest.raises(BadRows, match="Set brackets='read'"):
        cells.id_elements(
            CategoricalSpec(("h",), length=2, separator=","), make_chunk(h=["[4, 5]"])
        )


def test_padding_is_left_out_with_its_weights():
    assert lists(["a||b|", "", "|"], padding=("",)) == [["a", "b"], [], []]
    assert lists(["3|-1|-1", "-1"], padding=("-1",)) == [["3"], []]
    assert lists(["{a,NULL}", "{}"], brackets="read", separator=",", padding=("",)) == [["a"], []]
    typed = [[3, -1, None], [-1], [0]]
    assert lists(typed, padding=("", "-1", "x")) == [[3], [], [0]]
    assert lists([[3.0, -1.0, None]], padding=("", "-1")) == [[3.0]]
    entry = RaggedSpec(("h",), weights="w", padding=("0",))
    result = cells.list_elements(entry, make_chunk(h=["5|0|6", "0"], w=["1|2|3", "4"]))
    assert result.ids.values.to_pylist() == ["5", "6"]
    assert result.ids.lengths.tolist() == [2, 0]
    assert result.weights.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("kind", "padding", "values", "left"),
    [
        (pa.int32(), "4294967296", [0, 1], [0, 1]),
        (pa.int16(), "65535", [-1, 1], [-1, 1]),
        (pa.uint32(), "-1", [2**32 - 1, 1], [2**32 - 1, 1]),
        (pa.uint64(), "-1", [2**64 - 1, 1], [2**64 - 1, 1]),
        (pa.uint64(), str(2**64 - 1), [2**64 - 1, 2**64 - 2], [2**64 - 2]),
        (pa.int64(), str(2**63), [-(2**63), 1], [-(2**63), 1]),
        (pa.int64(), str(-(2**63)), [-(2**63), 1], [1]),
        (pa.float64(), "NaN", [float("nan"), 1.0, None], [1.0, None]),
        (pa.float32(), "-1", [-1.0, 1.0], [1.0]),
        (pa.float64(), "-1.0", [-1.0, 1.0], [1.0]),
        (pa.int64(), "-1.", [-1, 1], [1]),
        (pa.float64(), "1.5", [1.5, 1.0], [1.5, 1.0]),
        (pa.string(), "-1.0", ["-1", "-1.0"], ["-1"]),
        (pa.string(), "nan", ["nan", "NaN"], ["NaN"]),
    ],
)
def test_padding_leaves_out_only_the_same_number(kind, padding, values, left):
    kept = ~cells.is_padding(pa.array(values, kind), (padding,))
    assert pa.array(values, kind).filter(pa.array(kept)).to_pylist() == left


@pytest.mark.parametrize(
    "values",
    [
        ["a", "a||b"],
        [["a"], ["a", None, "b"]],
        [["a"], ["a", ""]],
        [b"a", b"a||b"],
        [[b"a"], [b"a", b""]],
    ],
)
def test_an_empty_id_is_rejected_with_the_field_that_leaves_it_out(values):
    with pytest.raises(BadRows, match=r"row 3.*without empty ids: .*Set padding=\[''\]"):
        lists(values)


def test_bytes_that_are_not_text_are_rejected_with_their_row():
    with pytest.raises(BadRows, match=r"row 3, column h: must be text in UTF-8: found b'\\xff'"):
        lists([[b"a"], [b"b", b"\xff"]])


def test_ids_and_weights_may_be_in_one_cell():
    result = lists(["12:0.5|13:2", "", "a:b:1e-1"], weight_separator=":")
    assert result == ([["12", "13"], [], ["a:b"]], [0.5, 2, 0.1])
    result = lists(["12:0.5||0", "13:1"], weight_separator=":", padding=("", "0"))
    assert result == ([["12"], ["13"]], [0.5, 1])
    result = lists([[b"12:0.5", b""], [b"13:1"]], weight_separator=":", padding=("",))
    assert result == ([["12"], ["13"]], [0.5, 1])
    with pytest.raises(BadRows, match="row 3, column h: must be a list of ids and weights"):
        lists(["1:1", "1:1|2"], weight_separator=":")
    with pytest.raises(BadRows, match="row 2, column h: must be 0 or a finite number.*'x'"):
        lists(["1:x"], weight_separator=":")


def test_a_cut_list_keeps_its_first_or_last_ids():
    cut = dict(max_length=2, on_overlong="truncate")
    values = ["a|b|c|d", "e", "f|g"]
    assert lists(values, **cut) == [["a", "b"], ["e"], ["f", "g"]]
    assert lists(values, **cut, keep="last") == [["c", "d"], ["e"], ["f", "g"]]
    weighted = lists(["a:1|b:2|c:3"], **cut, keep="last", weight_separator=":")
    assert weighted == ([["b", "c"]], [2, 3])


FOURS = pa.array([[1.0, 2, 3, 4], None, [5, None, 7, 8]])
VECTORS = {
    "list": FOURS,
    "fixed_size_list": FOURS.cast(pa.list_(pa.float32(), 4)),
    "large_list": FOURS.cast(pa.large_list(pa.float64())),
    "text": ["1|2|3|4", None, "5||7|8"],
    "bytes": [b"1|2|3|4", b"", b"5||7|8"],
    "brackets": ["[1.0, 2, 3, 4]", "[]", "[5, null, 7, 8]"],
    "numpy": ["[1. 2. 3. 4.]", "", "5||7|8"],
}


@pytest.mark.parametrize("values", VECTORS.values(), ids=VECTORS)
def test_a_vector_is_as_many_floats(values):
    chunk = make_chunk(e=values, x=[10, 20, 30])
    names = [f"e[{k}]" for k in range(4)]
    entries = [DenseSpec((name,), length=4, separator="|") for name in names]
    result = raw_floats([*entries, DenseSpec(("x",))], chunk)
    nan = np.nan
    expected = [[1, 2, 3, 4, 10], [nan, nan, nan, nan, 20], [5, nan, 7, 8, 30]]
    np.testing.assert_array_equal(result, expected)


def test_a_vector_of_another_length_is_rejected_with_its_row():
    entries = [DenseSpec((f"e[{k}]",), length=2, separator="|") for k in range(2)]
    with pytest.raises(BadRows, match="row 3, column e: must have length=2 numbers: found 3"):
        raw_floats(entries, make_chunk(e=["1|2", "1|2|3"]))
    with pytest.raises(InputError, match="column e: must be a finite number.*Set `length`"):
        raw_floats([DenseSpec(("e",))], make_chunk(e=[[1.0, 2.0]]))
