"""Tests of sequences: lists whose ids are aligned, compared with loops over events."""

import math

import numpy as np
import pyarrow as pa
import pytest

from jaxrank.data.chunk import Chunk, numbered
from jaxrank.data.encode.sequences import all_lists
from jaxrank.data.rejects import BadRows
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.resolve import provisional_schema, resolve
from jaxrank.errors import InputError

NOW = 1_700_000_000
COLUMNS = {
    "item": [["a", "b", "0", "c"], [], ["d", "e", "f", "g"], ["h"]],
    "category": [["k", "l", "m", "n"], [], ["o", "p", "q", "r"], ["s"]],
    "when": [
        [NOW - 100, NOW - 7, NOW - 2, NOW - 1],
        None,
        [NOW - 9, NOW - 8, NOW - 3, NOW],
        [NOW + 5],
    ],
    "time": [NOW] * 4,
}


def spec(sequence=(), ragged=(), **fields):
    section = {
        "tasks": [{"name": "click", "label": "click"}],
        "ragged": [
            dict(columns=["item", "category"], combiner="none", max_length=2, padding=["0"])
            | dict(on_overlong="truncate")
            | dict(ragged)
        ],
        "sequences": [
            dict(name="history", columns=["item", "category"], order="oldest_first")
            | dict(time="when", ages=True)
            | dict(sequence)
        ],
        "time": "time",
    }
    return resolve(FeatureSpec.from_state(section | fields), [*COLUMNS, "click"])


def lists(columns, **settings):
    features = spec(**settings)
    batch = pa.RecordBatch.from_pydict(columns)
    chunk = Chunk(batch, "data", numbered(2, batch.num_rows))
    result = {}
    for entry, cells in zip(features.ragged, all_lists(features, chunk), strict=True):
        ends = np.cumsum(cells.ids.lengths).tolist()
        ids = cells.ids.values.to_pylist()
        result[entry.name] = [ids[a:b] for a, b in zip([0, *ends], ends, strict=False)], cells
    return result


def expected(columns, oldest_first=True, most=2, timed=True):
    """Returns the ids of each column, the ages, and the numbers of late and cut events."""
    result, late, cut = {"item": [], "category": [], "history:age": []}, 0, 0
    rows = zip(*(columns[name] for name in ("item", "category", "when", "time")), strict=True)
    for items, categories, whens, time in rows:
        events = list(zip(items, categories, whens or [], strict=True))
        events = [event for event in events if event[0] != "0"]
        before = [event for event in events if not timed or event[2] < time]
        late += len(events) - len(before)
        newest = before[::-1] if oldest_first else before
        cut += max(len(newest) - most, 0)
        newest = newest[:most]
        result["item"].append([item for item, _, _ in newest])
        result["category"].append([category for _, category, _ in newest])
        result["history:age"].append(
            [int(math.log2(max(1 + time - when, 1))) for *_, when in newest]
        )
    return result, late, cut


@pytest.mark.parametrize("order", ["oldest_first", "newest_first"])
def test_a_sequence_keeps_the_newest_events_before_the_example(order):
    columns = dict(COLUMNS)
    if order == "newest_first":
        for name in ("item", "category", "when"):
            columns[name] = [cell and cell[::-1] for cell in columns[name]]
    result = lists(columns, sequence={"order": order})
    ids, late, cut = expected(columns, order == "oldest_first")
    assert {name: of_column for name, (of_column, _) in result.items()} == ids
    assert (late, cut) == (2, 2)
    for _, cells in result.values():
        assert (cells.late, cells.late_lists, cells.truncated) == (late, 2, cut)


def test_a_sequence_without_times_keeps_all_events():
    result = lists(COLUMNS, sequence={"time": "", "ages": False})
    ids, _, _ = expected(COLUMNS, timed=False)
    assert {name: of_column for name, (of_column, _) in result.items()} == {
        name: ids[name] for name in ("item", "category")
    }


def test_text_of_lists_is_read_like_lists():
    text = {
        name: ["|".join(map(str, cell or [])) for cell in COLUMNS[name]]
        for name in ("item", "category", "when")
    }
    assert [of_column for of_column, _ in lists(COLUMNS | text).values()] == [
        of_column for of_column, _ in lists(COLUMNS).values()
    ]


BAD_DATA = [
    ({"category": [["k"], [], [], ["s"]]}, {}, r"row 2, column category: must have as many values"
     r" as item, which is part of the same sequence: found 1 and 4"),
    ({"when": [[1.5e9, 1.4e9, 1.3e9, 1.2e9], [], [1e9] * 4, [1e9]]}, {},
     r"row 2, column when: must be a list of times in the order 'oldest_first'"),
    ({"when": [[NOW] * 4, [], [NOW, NOW, None, NOW], [NOW]]}, {}, r"row 4, column when"),
    ({"time": [NOW, NOW, None, NOW]}, {}, r"row 4, column time: must be a time"),
    ({"item": [["a", "b", "0", None], [], ["d"] * 4, ["h"]]}, {},
     r"row 2, column item: must be a list without empty ids"),
    ({}, {"on_overlong": "error"}, r"row 2, column item: must have at most max_length=2 ids: .* 3"),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "ragged", "message"), BAD_DATA)
def test_lists_that_do_not_fit_together_are_rejected(columns, ragged, message):
    with pytest.raises(BadRows, match=message):
        lists(COLUMNS | columns, ragged=ragged)


BAD_SPECS = [
    (dict(sequence={"columns": ["item", "sort"]}), "'sort' must be a column of features.ragged"),
    (dict(sequence={"time": "", "ages": True}), r"sequences\[0\].ages: must be False without"),
    (dict(sequence={"order": "sorted"}), r"order: must be one of 'oldest_first', 'newest_first'"),
    (dict(sequence={"name": "a/b"}), r"sequences\[0\].name: must be a name without '/'"),
    (dict(ragged={"combiner": "mean"}), "must be of combiner 'none'.*found 'mean'"),
    (
        dict(ragged={"keep": "last"}),
        "features.ragged.keep: must be 'first' for 'item'.*found 'last'",
    ),
    (dict(time=""), r"features.time: must be the name of the column of times with .*\[0\].time"),
    (
        dict(
            ragged={"columns": "item"},
            sequences=[
                dict(name="a", columns="item", order="newest_first"),
                dict(name="b", columns="item", order="newest_first"),
            ],
        ),
        r"columns of one sequence; 'item' is also in sequences\[0\]",
    ),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SPECS)
def test_an_invalid_sequence_is_rejected(settings, message):
    with pytest.raises(InputError, match=message):
        spec(**settings)


def test_a_schema_names_the_sequence_of_each_feature():
    resolved = spec()
    again = resolve(resolved, [*COLUMNS, "click"])
    assert again == resolved
    schema = provisional_schema(resolved)
    assert [(f.name, f.sequence, f.length) for f in schema.ragged] == [
        ("item", "history", 2),
        ("category", "history", 2),
        ("history:age", "history", 2),
    ]
