"""The scorer and the preparation read lists in brackets by the same rules, on generated texts."""

import random
import warnings

import numpy as np
import pyarrow as pa
import pytest
from jaxrank_serving import brackets as scorer

from jaxrank.data.encode import brackets as preparation

SPACES = [" ", "\t", "\n", "\r", "\f", "\v", "\x1c", "\xa0", "\u2003", "\u2028"]
PAIRS = ["[]", "()", "{}", "''", '""', ("array(", ")"), ("List(", ")"), ("", "")]
PAIRS += [("deque(", ")"), ("ARRAY[", "]"), "<>", ("vec![", "]"), ("b'", "'")]
PARTS = [
    *"[](){}'\",|:\\_",
    *SPACES,
    "a",
    "1",
    "-2",
    "1.5",
    "1e400",
    "nan",
    "null",
    "NULL",
    "None",
    "true",
]
PARTS += [
    "...",
    "\u2026",
    "''",
    '""',
    "[1, 2]",
    "'x'",
    "b'y'",
    "array(",
    "f([",
    ", n=1)",
    "a.b(",
    "<",
    ">",
    "é",
    "\u0661",
    "\U0001f642",
    "\x00",
]

# A beginning, a repeated part and an end, of which a check in quadratic time takes minutes.
LONG = [
    ("", " ", "x"),
    ("", " ", "]"),
    ("x", " ", ")"),
    ("", "[", ""),
    ("", "(", ")"),
    ("", ",", "]"),
]
LONG += [("", "'", "x"), ("", '"', ""), ("", "List(", ")"), ("<", ",", "> x"), ("f[", ",", "] x")]
LONG += [("f([", "],b=", "() x)"), ("f([", "],b=", "()"), ("f([]", " ", "x)"), ("[", ",", "x")]
LONG += [("[1", " ", "x]"), ("['a'", " , 'b'", "x"), ("List(1", ",a=1", ",)"), ("[0x", "f", "]")]


def generated(count):
    r = random.Random(0)
    for _ in range(count):
        opening, closing = r.choice(PAIRS)
        inner = "".join(r.choices(PARTS, k=r.randint(0, 6)))
        space = r.choice(SPACES) if r.random() < 0.3 else ""
        yield space + opening + inner + closing


@pytest.mark.parametrize("separator", [",", "|", "\\"])
def test_the_scorer_reads_brackets_as_the_preparation_does(separator):
    cells = list(generated(5000))
    expected = preparation.bracketed(pa.array(cells))
    assert 500 < expected.sum() < 4500
    np.testing.assert_array_equal([scorer.is_bracketed(cell) for cell in cells], expected)
    lists = [scorer.find_list([cell]) == 0 for cell in cells]
    np.testing.assert_array_equal(lists, preparation.lists(pa.array(cells)))
    assert 300 < sum(lists) < expected.sum() - 300
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of Python, about escapes in cells
        lists = [preparation.read(cell, separator) for cell in cells]
        assert [scorer.read(cell, separator) for cell in cells] == lists
    assert sum(values is None for values in lists) > 500
    assert sum(bool(values) for values in lists) > 500


def test_the_scorer_finds_the_parts_of_lists_that_the_preparation_rejects():
    r = random.Random(1)
    words = [
        "[1",
        "2]",
        " (a",
        "b) ",
        "{x",
        "7}",
        "a",
        "3",
        "[1,2]",
        "",
        "[",
        "]",
        "(a)",
        "a]b",
        "['c",
    ]
    values = [r.choices(words, k=r.randint(0, 4)) for _ in range(600)]
    rejected = 0
    for value in values:
        flags = preparation.in_lists(pa.array(value, pa.string()), np.array([len(value)]))
        first = int(np.flatnonzero(flags)[0]) if flags.any() else None
        assert scorer.find_part(value, [len(value)]) == first, value
        rejected += flags.any()
    assert 100 < rejected < 500
    joined = [["a", "b"], ["c"], ["[1", "x", "2]"], ["[3", "4]"]]
    assert scorer.find_part([part for value in joined for part in value], [2, 1, 3, 2]) == 3


@pytest.mark.parametrize(("beginning", "repeated", "end"), LONG)
def test_a_long_cell_stops_neither_the_scorer_nor_the_preparation(beginning, repeated, end):
    cell = beginning + repeated * (100_000 // len(repeated)) + end
    assert scorer.is_bracketed(cell) == preparation.bracketed(pa.array([cell]))[0]
    assert (scorer.find_list([cell]) == 0) == preparation.lists(pa.array([cell]))[0]
    assert scorer.read(cell) == preparation.read(cell)


def test_a_cell_is_in_brackets_whatever_the_cells_beside_it():
    cells = list(generated(2000))
    alone = [bool(preparation.bracketed(pa.array([cell]))[0]) for cell in cells]
    np.testing.assert_array_equal(preparation.bracketed(pa.array(cells)), alone)
