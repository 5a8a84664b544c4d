"""Compares placement from measured traffic, and its replay, with plain loops."""

import collections
import itertools
import re

import numpy as np
import pytest
import tiny
from examples import rows_in_order

from jaxrank.config_files import to_plain
from jaxrank.data.prepare import passes
from jaxrank.data.sources.registry import synthetic_source
from jaxrank.data.synthetic import source as synthetic
from jaxrank.embedding.storage import GROUPS, group
from jaxrank.errors import InputError
from jaxrank.features import PAD, Categorical, Ragged, Schema, Table, Task
from jaxrank.layout import ReplicatedRows, layout
from jaxrank.placement import frequency, planner, traffic
from jaxrank.placement.replay import replay
from jaxrank.placement.traffic import TableReads, Traffic

# --- the sample ---


class Pieces:
    """Reads from memory: (ids, lists of each example) per part."""

    def __init__(self, schema, parts):
        self.schema = schema
        self.part_rows = np.array([len(ids) for ids, _ in parts])
        self._parts = parts

    def read(self, part):
        ids, lists = self._parts[part]
        lengths = [[len(ids) for ids in example] for example in lists]
        values = [v for example in lists for ids in example for v in ids]
        count = len(self.schema.ragged)
        return traffic._examples(
            np.asarray(ids, np.int32).reshape(len(ids), -1),
            np.asarray(lengths, np.int32).reshape(len(ids), count),
            np.asarray(values, np.int32),
        )


def mixed_schema():
    """Two id columns that share a table with a sequence, and a combined list."""
    return Schema(
        tasks=(Task("click"),),
        dense=(),
        categorical=(Categorical("pair", "item", 2), Categorical("user", "user")),
        ragged=(Ragged("history", "item", "none", length=2), Ragged("tags", "tag")),
        tables=tuple(Table(n, r, "integer") for n, r in (("item", 90), ("user", 700), ("tag", 80))),
    )


def mixed_parts(count=3, examples=8, seed=0):
    random = np.random.default_rng(seed)

    def rows(most, size):
        return (most * random.random(size) ** 3).astype(int)

    parts = []
    for _ in range(count):
        ids = np.stack([rows(90, examples), rows(90, examples), rows(700, examples)], axis=1)
        ids[random.random(ids.shape) < 0.1] = PAD
        lists = [[rows(90, random.integers(5)), rows(80, random.integers(4))] for _ in ids]
        parts.append((ids, lists))
    return parts


def test_measured_reads_are_those_of_plain_loops():
    parts = mixed_parts()
    result = traffic.measure(Pieces(mixed_schema(), parts), examples=1000)
    expected = {"item": collections.Counter(), "user": collections.Counter()}
    expected["tag"] = collections.Counter()
    for ids, lists in parts:
        for (a, b, user), (history, tags) in zip(ids.tolist(), lists, strict=True):
            # A sequence keeps one id per place.
            expected["item"].update([a, b, *history[:2]])
            expected["user"].update([user])
            expected["tag"].update(tags)
    assert result.examples == 24
    for name, counts in expected.items():
        counts.pop(int(PAD), None)
        rows = sorted(counts)
        np.testing.assert_array_equal(result.tables[name].rows, rows)
        np.testing.assert_array_equal(result.tables[name].counts, [counts[r] for r in rows])


def test_a_sample_is_spread_over_the_data_and_no_larger_than_asked():
    reads = Pieces(mixed_schema(), mixed_parts(count=10))
    result = traffic.measure(reads, examples=24)
    assert result.examples == 24
    assert result.parts.tolist() == [0, 4, 9]


def test_batches_leave_the_sample_out_and_then_begin_again():
    schema = Schema(
        (Task("click"),), (), (Categorical("a", "a"),), (), (Table("a", 99, "integer"),)
    )
    parts = [(np.full((4, 1), i), [[]] * 4) for i in range(6)]
    reads = Pieces(schema, parts)
    drawn = list(itertools.islice(traffic.batches(reads, 8, np.array([1, 4]), seed=0), 4))
    assert all(batch.rows == 8 for batch in drawn)
    read = np.concatenate([batch.ids[:, 0] for batch in drawn])
    assert np.bincount(read, minlength=6).tolist() == [8, 0, 8, 8, 0, 8]
    assert (np.diff(drawn[0].ids[:, 0]) != 0).sum() > 1  # shuffled
    # Less than a batch would remain, so the sample is not left out.
    few = next(traffic.batches(reads, 20, np.array([0, 1]), seed=0))
    assert few.rows == 20


def test_generated_reads_are_those_of_the_prepared_store(tmp_path):
    config = tiny.config()
    features, source = to_plain(config.features), to_plain(config.source)
    features["ragged"][1]["max_length"] = 3
    features["ragged"][1]["on_overlong"] = "truncate"
    store = passes.prepare(
        features, source, tmp_path / "store", block_size=1000, report=lambda _: None
    )
    stored = traffic.StoredReads(store.split("train"), store.schema)
    generated = traffic.GeneratedReads(synthetic_source(source), "train", features)
    assert generated.schema.tables == stored.schema.tables
    assert generated.part_rows.sum() == stored.part_rows.sum() == 6000
    whole = generated.read(0)
    pieces = [stored.read(i) for i in range(len(stored.part_rows))]
    for name in ("ids", "list_lengths", "list_values"):
        expected = np.concatenate([getattr(piece, name) for piece in pieces])
        np.testing.assert_array_equal(getattr(whole, name), expected)
    assert whole.list_lengths[:, 1].max() == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoding": "hash", "rows": 50}, "'c0' must hold generated row numbers.*'hash'. Run"),
        ({"columns": "click"}, "'click' must hold generated row numbers"),
        ({"length": 2}, "'c0' must have length=1: found 2"),
        ({"rows": 7}, r"column c0: .* row of .*'c0', 0 to 6.*: found \d+"),
    ],
)
def test_features_that_cannot_be_read_without_a_store_are_rejected(change, message):
    config = tiny.config()
    features, source = to_plain(config.features), to_plain(config.source)
    features["tasks"], features["keep"] = [{"name": "conversion", "label": "conversion"}], []
    features["categorical"][0] |= change
    with pytest.raises(InputError, match=message):
        traffic.GeneratedReads(synthetic_source(source), "train", features).read(0)


def test_a_split_that_is_not_there_or_empty_is_rejected():
    features = to_plain(tiny.config().features)
    source = to_plain(tiny.config().source) | {"rows": {"train": 0}}
    generated = synthetic_source(source)
    with pytest.raises(InputError, match="data.train: .*'train'.*: found 'x'"):
        traffic.GeneratedReads(generated, "x", features)
    with pytest.raises(InputError, match="source.rows.train: must be at least 1"):
        traffic.GeneratedReads(generated, "train", features)


# --- estimates for a step ---


def test_the_chance_of_a_row_is_its_share_of_all_ways_to_draw():
    examples, share = 9, 4
    draws = list(itertools.combinations(range(examples), share))
    for count in range(examples + 1):
        hits = sum(any(e < count for e in draw) for draw in draws)
        (result,) = frequency.chance(np.array([count]), examples, share)
        assert result == pytest.approx(hits / len(draws), abs=1e-12)


def test_a_row_is_certain_where_a_share_is_as_large_as_the_sample():
    np.testing.assert_array_equal(frequency.chance(np.array([0, 1, 30]), 20, 20), [0, 1, 1])
    np.testing.assert_array_equal(frequency.chance(np.array([0, 1, 30]), 20, 50), [0, 1, 1])


def test_expected_different_rows_are_those_of_simulated_steps():
    random = np.random.default_rng(0)
    sample = make_traffic(random, {"a": (5000, 1.2)}, examples=60_000)
    expected = frequency.chance(sample.tables["a"].counts, 60_000, 700).sum()
    result = [len(np.unique(power_law(random, 5000, 1.2, 700))) for _ in range(200)]
    assert expected == pytest.approx(np.mean(result), rel=0.01)


def test_falling_counts_are_those_of_pooled_violators():
    random = np.random.default_rng(1)
    for size in (1, 2, 3, 50, 400):
        counts = random.poisson(300 / (1 + np.arange(size)))
        pools = []
        for count in counts.tolist():
            pools.append([float(count), 1])
            while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
                (a, m), (b, n) = pools.pop(-2), pools.pop(-1)
                pools.append([(a * m + b * n) / (m + n), m + n])
        expected = [mean for mean, width in pools for _ in range(width)]
        np.testing.assert_allclose(frequency.falling(counts), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("unique", "shards", "slack", "most", "expected"),
    [
        (3200, 32, 5.0, 10_000, 152),  # 100 + 5 * 10 = 150
        (3200, 32, 0.0, 10_000, 104),
        (0, 32, 5.0, 10_000, 8),
        (3200, 32, 5.0, 61, 64),
    ],
)
def test_a_buffer_has_room_for_the_mean_and_some_deviations(unique, shards, slack, most, expected):
    assert planner.capacity(unique, shards, slack, most, 8) == expected


# --- decisions ---


def power_law(random, rows, exponent, size):
    return synthetic._power_law(random.random(size), rows, exponent)


def make_traffic(random, tables, examples):
    """Samples one id per example of each table: (rows, exponent)."""
    reads = {}
    for name, (rows, exponent) in tables.items():
        drawn = power_law(random, rows, exponent, examples)
        reads[name] = TableReads(*np.unique(drawn, return_counts=True))
    return Traffic(examples, reads, np.arange(1), {})


TABLES = {"tiny": (50, 1.0), "even": (120, 0.0), "big": (100_000, 1.3), "other": (9000, 1.1)}


def make_plan(tables, *, devices=16, share=1000, encoding="integer", seed=0, asked=None, dims=None):
    sample = make_traffic(np.random.default_rng(seed), tables, 40_000)
    return planner.make_plan(
        make_schema(tables, encoding),
        dict.fromkeys(tables, 16) | (dims or {}),
        sample,
        devices=devices,
        share=share,
        placement_of=dict.fromkeys(tables, "auto") | (asked or {}),
    )


def make_schema(tables, encoding="integer"):
    return Schema(
        tasks=(Task("click"),),
        dense=(),
        categorical=tuple(Categorical(name, name) for name in tables),
        ragged=(),
        tables=tuple(Table(name, rows, encoding) for name, (rows, _) in tables.items()),
    )


def test_auto_keeps_small_and_hot_tables_whole_and_splits_the_others():
    plan = make_plan(TABLES)
    result = {t.name: t for t in plan.tables}
    assert list(result) == list(TABLES)
    assert {n: t.placement for n, t in result.items()} == {
        "tiny": "replicated", "even": "replicated", "big": "rows", "other": "rows",
    }  # fmt: skip
    assert result["tiny"].reason == "at most 64 rows"
    assert result["even"].reason == "each row is read by 90% of the devices in each step"
    count = result["big"].replicated_rows
    assert result["big"].reason.startswith(f"the hottest {count} rows on every device: read by")
    hot = plan.hot["dim16"]
    assert hot.replicated_tables == ("tiny", "even")
    assert set(hot.hot_rows) == {"big", "other"}
    merged = collections.Counter(hot.hot_rows[: hot.replicated])
    assert merged == {"big": count, "other": result["other"].replicated_rows}


def test_hot_rows_are_merged_by_how_often_they_are_read():
    """Compares with exact frequencies, which a sample estimates within a few percent."""
    plan = make_plan(TABLES)
    hot = plan.hot["dim16"]
    ranks, chances = collections.Counter(), []
    for name in hot.hot_rows:
        rows, exponent = TABLES[name]
        edges = np.array([ranks[name] + 1.0, ranks[name] + 2.0]) ** (1 - exponent)
        share = (edges[0] - edges[1]) / (1 - (rows + 1.0) ** (1 - exponent))
        chances.append(1 - (1 - share) ** 1000)
        ranks[name] += 1
    chances = np.array(chances)
    assert chances[: hot.replicated].min() > 0.87
    assert chances[hot.replicated : hot.replicated + 20].mean() < 0.9
    assert 0.02 < chances[-50:].mean() < 0.05
    # Falling, up to the error of the sample.
    np.testing.assert_allclose(chances, np.sort(chances)[::-1], atol=0.08)


def test_expected_lookups_of_split_rows_are_those_of_simulated_steps():
    plan = make_plan(TABLES)
    random = np.random.default_rng(5)
    for table in plan.tables:
        rows, exponent = TABLES[table.name]
        result = []
        for _ in range(100):
            drawn = np.unique(power_law(random, rows, exponent, 1000))
            result.append((drawn >= table.replicated_rows).sum())
        assert table.unique == pytest.approx(np.mean(result), rel=0.02, abs=0.5)
    assert plan.unique["dim16"] == pytest.approx(sum(t.unique for t in plan.tables))


def test_the_same_data_gives_the_same_placement():
    assert make_plan(TABLES).hot == make_plan(TABLES).hot
    assert make_plan(TABLES).hot != make_plan(TABLES, seed=1).hot


def test_each_dimension_has_hot_rows_of_its_own():
    plan = make_plan(TABLES, dims={"big": 32, "tiny": 32})
    assert plan.hot["dim32"].replicated_tables == ("tiny",)
    assert set(plan.hot["dim32"].hot_rows) == {"big"}
    assert plan.hot["dim16"].replicated_tables == ("even",)
    assert set(plan.hot["dim16"].hot_rows) == {"other"}
    layout(make_schema(TABLES), dict.fromkeys(TABLES, 16) | {"big": 32, "tiny": 32}, plan.hot)


def test_rows_of_missing_and_unknown_values_do_not_hide_the_hot_ones_behind_them():
    tables = {"big": (100_000, 1.3)}
    plain = make_plan(tables).hot["dim16"]
    sample = make_traffic(np.random.default_rng(0), tables, 40_000)
    reads = sample.tables["big"]
    moved = TableReads(reads.rows + np.int32(2), reads.counts)  # rows 0 and 1 are never read
    (result,) = planner.make_plan(
        make_schema({"big": (100_002, 1.3)}, "vocabulary"),
        {"big": 16},
        sample._replace(tables={"big": moved}),
        devices=16,
        share=1000,
        placement_of={"big": "auto"},
    ).hot.values()
    assert len(result.hot_rows) == len(plain.hot_rows) + 2
    assert result.replicated == plain.replicated + 2


def test_hot_rows_that_are_not_in_front_are_reported():
    tables = {"big": (100_000, 1.3), "less": (100_000, 1.1)}
    sample = make_traffic(np.random.default_rng(0), tables, 40_000)
    backwards = {
        name: TableReads(99_999 - reads.rows[::-1], reads.counts[::-1])
        for name, reads in sample.tables.items()
    }
    plan = planner.make_plan(
        make_schema(tables),
        dict.fromkeys(tables, 16),
        sample._replace(tables=backwards),
        devices=16,
        share=1000,
        placement_of=dict.fromkeys(tables, "auto"),
    )
    assert plan.hot["dim16"] == ReplicatedRows()
    (warning,) = plan.warnings
    assert re.search(r"are split: big \(\d+\), less \(\d+\)\. Number rows by falling", warning)
    assert plan.tables[0].reason == "no row is read by 90% of the devices in each step"
    assert make_plan(tables).warnings == ()


def test_on_one_device_nothing_is_hot():
    plan = make_plan(TABLES, devices=1, asked={"big": "replicated"})
    assert plan.hot == {"dim16": ReplicatedRows()}
    assert {(t.placement, t.reason) for t in plan.tables} == {("rows", "there is one device")}


def test_a_placement_that_is_asked_for_is_taken():
    plan = make_plan(TABLES, asked={"big": "rows", "other": "replicated", "tiny": "rows"})
    hot = plan.hot["dim16"]
    assert hot == ReplicatedRows(replicated_tables=("even", "other"))
    result = {t.name: (t.placement, t.replicated_rows, t.reason) for t in plan.tables}
    assert result["big"] == ("rows", 0, "set by the config")
    assert result["other"] == ("replicated", 9000, "set by the config")
    assert result["tiny"] == ("rows", 0, "set by the config")


def test_patterns_say_which_tables_a_placement_is_for():
    result = planner.placements(["a1", "a2", "b"], "auto", {"a*": "rows", "a2": "replicated"})
    assert result == {"a1": "rows", "a2": "replicated", "b": "auto"}
    with pytest.raises(InputError, match=r"embedding.placements: 'c\*' must match a table.*a1"):
        planner.placements(["a1"], "auto", {"c*": "rows"})


# --- the replay ---


@pytest.mark.parametrize(("replicas", "shards"), [(1, 4), (2, 2)])
def test_a_replay_counts_what_plain_loops_count(replicas, shards):
    schema = mixed_schema()
    rows = {t.name: t.rows for t in schema.tables}
    hot = ReplicatedRows(("tag",), ("item", "user", "user", "item", "user"), 3)
    planned = layout(schema, dict.fromkeys(rows, 16), {"dim16": hot})
    parts = mixed_parts(count=5, examples=16)
    reads = Pieces(schema, parts)
    result = replay(
        planned,
        [reads.read(i) for i in range(5)],
        replicas=replicas,
        shards=shards,
        capacities={"dim16": 4},
    )

    place = {pair: i for i, pair in enumerate(rows_in_order(rows, hot))}
    replicated = rows["tag"] + 3
    served, imbalances, sent, places, all_rounds, fullest = [], [], 0, 0, [], []
    for ids, lists in parts:
        asked = collections.Counter()  # (replica, sender, owner)
        for device in range(4):
            local = set()
            for example in range(device * 4, device * 4 + 4):
                a, b, user = ids[example].tolist()
                history, tags = lists[example]
                pairs = [("item", a), ("item", b), ("user", user)]
                pairs += [("item", r) for r in history[:2]] + [("tag", r) for r in tags]
                local |= {place[pair] for pair in pairs if pair[1] != PAD}
            for row in local:
                if row >= replicated:
                    owner = int(group(np.array([row - replicated]))[0]) * shards // GROUPS
                    asked[device // shards, device % shards, owner] += 1
        by_owner = collections.Counter()
        for (replica, _, owner), count in asked.items():
            by_owner[replica * shards + owner] += count
        served.append([by_owner[device] for device in range(4)])
        imbalances.append(max(served[-1]) / np.mean(served[-1]))
        buckets = replicas * shards * shards
        fullest.append(max(asked.values()) / (sum(asked.values()) / buckets))
        all_rounds.append(-(-max(asked.values()) // 4))
        sent += sum(asked.values())
        places += buckets * 4 * all_rounds[-1]
    np.testing.assert_allclose(result.lookups, np.mean(served, axis=0))
    assert result.imbalance == pytest.approx(np.mean(imbalances))
    assert result.largest_imbalance == pytest.approx(max(imbalances))
    assert result.fullest["dim16"] == pytest.approx(np.mean(fullest))
    assert result.rounds["dim16"] == np.mean(all_rounds) > 1
    assert result.buffer_use == pytest.approx(sent / places)


def test_a_replay_without_split_rows_is_even():
    schema = mixed_schema()
    hot = {"dim16": ReplicatedRows(("item", "user", "tag"))}
    planned = layout(schema, dict.fromkeys(("item", "user", "tag"), 16), hot)
    batch = Pieces(schema, mixed_parts(count=1)).read(0)
    result = replay(planned, [batch], replicas=1, shards=4, capacities={})
    assert result.imbalance == 1
    assert result.lookups.tolist() == [0, 0, 0, 0]
    assert np.isnan(result.buffer_use)
