"""Labels that are delayed or sampled, and hashed and bucketised features, against plain loops.

Also predictions of the full traffic from data with downsampled negatives.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrank import json_files, losses, validate
from jaxrank.data import examples as ex
from jaxrank.data.batches.batcher import Batcher
from jaxrank.data.chunk import Chunk, numbered
from jaxrank.data.encode import labels
from jaxrank.data.encode.encoder import Encoder
from jaxrank.data.rejects import Rejects
from jaxrank.data.spec.features import FeatureSpec
from jaxrank.data.spec.resolve import build_schema, resolve
from jaxrank.data.statistics.split import Statistics
from jaxrank.data.store import block as blocks
from jaxrank.errors import InputError
from jaxrank.features import MISSING_ROW, Schema
from jaxrank.layout import layout
from jaxrank.metrics import exact

HOUR = 3600
CLICK = dict(name="click", label="click")


def make_chunk(columns):
    batch = pa.RecordBatch.from_pydict({k: pa.array(v) for k, v in columns.items()})
    return Chunk(batch, "day.parquet", numbered(1, batch.num_rows))


def make_spec(columns, **features):
    features = dict(tasks=[CLICK], time_format="seconds") | features
    return resolve(FeatureSpec.from_state(features), list(columns))


def make_encoder(columns, boundaries=None, as_of=None, **features):
    spec = make_spec(columns, **features)
    return Encoder(spec, {}, {}, Statistics(spec), as_of=as_of, boundaries=boundaries)


def encode(columns, **features):
    return make_encoder(columns, **features).encode(make_chunk(columns))


# Delayed conversions.

BUY = dict(name="buy", time="bought", window_hours=2.0)


def label_by_hand(event, conversion, window, as_of, known=True):
    if not known:
        return None
    if event + window > as_of:
        return None
    return int(conversion is not None and conversion <= event + window)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 20),
            st.one_of(st.none(), st.integers(0, 8)),
            st.sampled_from([0, 1, None]),
            st.booleans(),
        ),
        min_size=1,
        max_size=20,
    ),
    st.integers(0, 25),
    st.booleans(),
    st.booleans(),
)
def test_a_conversion_counts_within_its_window_and_is_unknown_while_it_is_open(
    rows, as_of, with_label, with_mask
):
    half = HOUR // 2
    columns = {
        "at": [at * half for at, *_ in rows],
        "bought": pa.array([None if d is None else (at + d) * half for at, d, *_ in rows], "i8"),
        "label": pa.array([x for *_, x, _ in rows], "i1"),
        "mask": [int(m) for *_, m in rows],
    }
    task = BUY | (dict(label="label") if with_label else {})
    task |= dict(mask="mask") if with_mask else {}
    encoder = make_encoder(columns, as_of=as_of * half, tasks=[task], time="at")
    result = encoder.encode(make_chunk(columns)).labels[:, 0]
    expected, pending = [], 0
    for at, delay, label, mask in rows:
        known = (label is not None or not with_label) and (mask or not with_mask)
        conversion = None if delay is None else at + delay
        label_value = label_by_hand(at, conversion, 4, as_of, known)
        expected.append(np.nan if label_value is None else label_value)
        pending += known and label_value is None
    np.testing.assert_array_equal(result, np.float32(expected))
    statistics = encoder.statistics.summary()["tasks"]["buy"]
    assert statistics["pending"] == pending
    assert statistics["known"] == sum(e == e for e in expected)
    assert statistics["positives"] == sum(e == 1 for e in expected)


def test_what_is_known_of_late_conversions_has_their_share():
    draw = np.random.default_rng(3)
    at = draw.integers(0, 14 * 24, 50_000)
    delay = draw.exponential(60, at.size)
    delay[draw.random(at.size) > 0.2] = np.inf
    came_by_now = at + delay <= 14 * 24
    columns = {
        "at": (at * HOUR).tolist(),
        "bought": [
            int((a + d) * HOUR) if came else None
            for a, d, came in zip(at, delay, came_by_now, strict=True)
        ],
    }
    task = BUY | dict(window_hours=7 * 24.0)
    result = encode(columns, tasks=[task], time="at", as_of=14 * 24 * HOUR).labels[:, 0]
    assert 0.4 < np.isnan(result).mean() < 0.6
    assert np.nanmean(result) == pytest.approx((delay <= 7 * 24).mean(), abs=0.01)


def test_the_spec_says_when_the_data_was_looked_at_before_what_was_learned_does():
    columns = {"at": ["2024-05-01", "2024-05-02"], "bought": [None, "2024-05-02T01:30"]}
    features = dict(tasks=[BUY], time="at")

    def encoded(**more):
        return encode(columns, **features, **more).labels[:, 0].tolist()

    second = 1_714_608_000  # 2024-05-02
    assert encoded(as_of=second + HOUR) == [0, pytest.approx(np.nan, nan_ok=True)]
    spec = make_spec(columns, **features, as_of="2024-05-02 02:00:00")
    encoder = Encoder(spec, {}, {}, Statistics(spec), as_of=0.0)
    assert encoder.encode(make_chunk(columns)).labels[:, 0].tolist() == [0, 1]
    with pytest.raises(InputError, match=r"features.as_of: must be the time of the data"):
        encoded()
    assert labels.horizon(make_spec(["click"])) is None


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"at": [9, 9, 9], "bought": [9, 8, 7]},
            r"row 2, column bought: must be a time no earlier than the event's, in column at, or"
            r" empty: found 8",
        ),
        ({"at": [9, None], "bought": [9, None]}, r"row 2, column at: must be a time.*an empty"),
        ({"at": [9, 9], "bought": ["", "soon"]}, r"row 2, column bought: must be a time.*'soon'"),
    ],
)
def test_conversions_before_their_event_and_bad_times_are_rejected(columns, message):
    encoder = make_encoder(columns, as_of=100, tasks=[BUY], time="at")
    for run in (encoder.encode, encoder.check):
        with pytest.raises(InputError, match=f"day.parquet, {message}"):
            run(make_chunk(columns))


# Booleans.

SPELLED = ["true", "false", "TRUE", "False", "tRuE", "1", "0", "1.0", "0.0", "1e0", "", None]


def test_text_may_spell_booleans_in_any_case_as_numbers_and_types_of_their_own_do():
    meant = [{"t": 1, "f": 0, "1": 1, "0": 0}[x[0].lower()] if x else None for x in SPELLED]
    mask = [int(i % 5 != 2) for i in range(len(meant))]
    kinds = {
        "text": (SPELLED, ["fAlse" if m == 0 else "True" for m in mask]),
        "mixed": (SPELLED, ["fAlse" if m == 0 else "1" for m in mask]),
        "large text": (pa.array(SPELLED, pa.large_string()), pa.array(list(map(str, mask)))),
        "dictionary": (pa.array(SPELLED).dictionary_encode(), mask),
        "boolean": (pa.array(meant).cast(pa.bool_()), pa.array(mask).cast(pa.bool_())),
        "number": (meant, mask),
    }
    expected = [x if m and x is not None else np.nan for x, m in zip(meant, mask, strict=True)]
    for click, known in kinds.values():
        block = encode({"click": click, "known": known}, tasks=[CLICK | dict(mask="known")])
        np.testing.assert_array_equal(block.labels[:, 0], np.float32(expected))


@pytest.mark.parametrize("bad", ["yes", "t", " true", "true ", "truee", "falsetrue", "2", "ſtrue"])
def test_what_is_neither_a_boolean_nor_0_or_1_is_reported_with_what_may_be(bad):
    task = CLICK | dict(mask="known")
    good = ["true", "0", "FALSE"]
    for column, must in (("click", "0, 1, true, false or empty"), ("known", "0, 1, true or false")):
        columns = {"click": good, "known": good} | {column: [*good[:2], bad]}
        with pytest.raises(
            InputError, match=f"row 3, column {column}: must be {must}: found '{bad}'"
        ):
            encode(columns, tasks=[task])
    columns = {"click": [*good[:2], bad, "true", bad], "known": ["True"] * 5}
    rejects = Rejects("skip", 5)
    chunk, block = rejects.attempt(make_chunk(columns), make_encoder(columns, tasks=[task]).encode)
    assert block.labels[:, 0].tolist() == [1, 0, 1]
    assert [json.loads(line)["row"] for line in rejects.lines] == [3, 5]
    assert [json.loads(line)["found"] for line in rejects.lines] == [repr(bad)] * 2
    assert chunk.rows.tolist() == [1, 2, 4]


@pytest.mark.parametrize(
    "features",
    [
        dict(tasks=[dict(name="y", label="x", kind="real")]),
        dict(tasks=[dict(name="y", label="x", kind="count")]),
        dict(tasks=[CLICK | dict(weight="x")]),
        dict(tasks=[CLICK | dict(truth="x")]),
        dict(dense=[dict(columns="x")]),
    ],
)
def test_booleans_in_text_are_no_numbers_where_any_number_may_be(features):
    with pytest.raises(InputError, match="row 2, column x: must be a .*: found 'true'"):
        encode({"click": [1, 0], "x": ["1", "true"]}, **features)


# Downsampled negatives.


@pytest.mark.parametrize("column", ["", "rate"])
def test_negatives_weigh_what_was_left_out_or_the_logit_is_shifted(column):
    y = [1, 0, None, 0, 1, 0]
    rates = [0.5, 0.5, 1.0, 0.1, 0.1, 1.0] if column else [0.25] * 6
    weights = [1.0, 2.0, 1.0, 3.0, 0.5, 0.0]
    columns = {"click": y, "rate": rates, "w": weights, "buy": y}
    rate = dict(negative_rate_column="rate") if column else dict(negative_rate=0.25)
    weighted = CLICK | rate | dict(weight="w")
    shifted = dict(name="buy", label="buy", negative_correction="shift") | rate
    block = encode(columns, tasks=[weighted, shifted])
    expected = [w / (r if label == 0 else 1) for w, r, label in zip(weights, rates, y, strict=True)]
    np.testing.assert_allclose(block.weights[:, 0], expected, rtol=1e-6)
    assert block.weights[:, 1].tolist() == [1] * 6
    np.testing.assert_allclose(block.logit_correction, [[0, np.log(r)] for r in rates], rtol=1e-6)
    assert block.logit_correction.dtype == np.float32
    spec = make_spec(columns, tasks=[weighted, shifted])
    schema = build_schema(spec, {}, {}, {})
    assert [t.shifted for t in schema.tasks] == [False, True]
    assert schema.logit_correction_columns == 2
    assert validate.parse(Schema, json.loads(json_files.to_text(schema)), "") == schema


def test_without_such_a_task_there_are_neither_weights_nor_shifts():
    for task in (CLICK, CLICK | dict(negative_correction="shift")):
        block = encode({"click": [1, 0]}, tasks=[task])
        assert block.weights is None
        assert block.logit_correction is None
    assert (
        encode({"click": [1, 0]}, tasks=[CLICK | dict(negative_rate=0.5)]).logit_correction is None
    )
    shifted = CLICK | dict(negative_rate=0.5, negative_correction="shift")
    assert encode({"click": [1, 0]}, tasks=[shifted]).weights is None


@pytest.mark.parametrize("bad", [0.0, 1.5, -0.1, None, float("nan")])
def test_a_bad_negative_rate_is_rejected(bad):
    columns = {"click": [1, 0], "rate": [0.5, bad]}
    with pytest.raises(InputError, match=r"row 2, column rate: must be a number above 0 and at mo"):
        encode(columns, tasks=[CLICK | dict(negative_rate_column="rate")])


@pytest.mark.parametrize(
    ("task", "must"),
    [
        (
            dict(negative_rate_column="rate"),
            "row 2, column rate: must be a rate by which 1 can be divided to give at most 1e30:"
            " found 1e-50",
        ),
        (
            dict(negative_rate=0.001, weight="w"),
            "row 2, column w: must be a weight that is at most 1e30 after division by "
            "negative_rate=0.001: found 1e\\+28",
        ),
        (
            dict(negative_rate=1e-50),
            "negative_rate: must be at least 1e-38 and at most 1: found 1e-50",
        ),
    ],
)
def test_a_rate_that_makes_a_weight_infinite_is_rejected(task, must):
    columns = {"click": [1, 0], "rate": [1e-50, 1e-50], "w": [1e28, 1e28]}
    with pytest.raises(InputError, match=must):
        encode(columns, tasks=[CLICK | task])


def test_shifts_stay_with_their_examples_from_the_encoder_to_the_batch():
    rng = np.random.default_rng(0)
    n = 20
    rates = rng.uniform(0.01, 1, n)
    columns = {"click": rng.integers(0, 2, n), "rate": rates, "x": np.arange(n, dtype=float)}
    task = CLICK | dict(negative_rate_column="rate", negative_correction="shift")
    features = dict(tasks=[task], dense=[dict(columns="x")])
    block = encode(columns, **features)
    halves = [ex.cut(block, 0, 7), ex.cut(block, 7, n)]
    parts = blocks.from_arrow(blocks.to_arrow(ex.join(halves)))
    order = rng.permutation(n)
    shuffled = ex.permute(ex.join([ex.cut(parts, 0, 3), ex.cut(parts, 3, n)]), order)
    filled = ex.join([shuffled, ex.blank(shuffled, 4)])
    schema = build_schema(make_spec(columns, **features), {}, {}, {})
    batch = Batcher(layout(schema, {}), group=8, capacities={})(filled)
    expected = np.log(np.append(rates[order], np.ones(4)))
    np.testing.assert_allclose(batch.logit_correction[:, 0], expected, rtol=1e-6)
    np.testing.assert_array_equal(batch.dense[:n, 0], order)
    plain = Batcher(layout(schema, {}), group=8, capacities={})(
        dataclasses.replace(filled, logit_correction=None)
    )
    assert plain.logit_correction.shape == (n + 4, 0)


# A logistic model of one feature and an intercept generated the clicks. Its fit to the full traffic
# is the truth.


def traffic(n=200_000, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n)
    p = 1 / (1 + np.exp(2 - 1.2 * x))
    return x, (rng.random(n) < p).astype(int), rng.random(n)


def fitted(block):
    """Returns the coefficients (intercept, slope) of least loss, by Newton's method."""
    x = jnp.stack([np.ones(block.rows), block.dense[:, 0]], axis=1)
    labels = jnp.asarray(block.labels, x.dtype)
    weights = jnp.ones_like(labels) if block.weights is None else jnp.asarray(block.weights)
    logit_correction = (
        np.zeros((block.rows, 0)) if block.logit_correction is None else block.logit_correction
    )

    def loss(coefficients):
        logits = losses.sampled_logits((x @ coefficients)[:, None], jnp.asarray(logit_correction))
        total = weights.sum(0)
        return losses.weighted_loss(logits, labels, weights, jnp.ones(1), total, (losses.logistic,))

    # Newton's method converges from here, because the sampled classes are balanced.
    coefficients = jnp.array([logit_correction.mean() if logit_correction.size else 0.0, 0.0])
    step = jax.jit(lambda c: c - jnp.linalg.solve(jax.hessian(loss)(c), jax.grad(loss)(c)))
    for _ in range(8):
        coefficients = step(coefficients)
    return np.asarray(coefficients)


@pytest.mark.parametrize("correction", ["weight", "shift"])
@pytest.mark.parametrize("by_column", [False, True])
def test_predictions_are_of_all_traffic_though_nine_negatives_of_ten_were_left_out(
    correction, by_column
):
    x, y, u = traffic()
    # With a rate per row, the rate depends on the feature, and the slope also needs the correction.
    rate = np.where(x > 0, 0.05, 0.2) if by_column else np.full(len(x), 0.1)
    keep = (y == 1) | (u < rate)
    columns = {"click": y[keep], "x": x[keep], "rate": rate[keep]}
    rates = dict(negative_rate_column="rate") if by_column else dict(negative_rate=0.1)
    task = CLICK | rates | dict(negative_correction=correction)
    floats = [dict(columns="x")]
    with jax.enable_x64(True):
        block = encode(columns, tasks=[task], dense=floats)
        coefficients = fitted(block)
        plain = fitted(encode(columns, dense=floats))
    error = 4 / np.sqrt(keep.sum() * 0.15)  # four standard deviations
    np.testing.assert_allclose(coefficients, [-2, 1.2], atol=error)
    predicted = exact.probability(coefficients[0] + coefficients[1] * x)
    assert predicted.mean() == pytest.approx(y.mean(), rel=0.02)
    wrong = exact.probability(plain[0] + plain[1] * x).mean()
    assert wrong > 2 * y.mean()  # the error without the correction


# Bucketised floats and hashed ids.


def row_by_hand(value, boundaries):
    if value is None:
        return MISSING_ROW
    value = np.float32(min(max(value, -3e38), 3e38))
    return 2 + sum(np.float32(b) <= value for b in boundaries)


@pytest.mark.parametrize("fitted", [False, True])
def test_a_number_has_the_row_of_its_bucket(fitted):
    boundaries = [-1.5, 0.0, 0.1, 7.0]
    values = [-2, -1.5, -1.4, None, 0, -0.0, 0.1, np.nextafter(0.1, 0), 6.9, 7, 1e300, -1e300]
    columns = {"click": [1] * len(values), "x": pa.array(values, "f8"), "y": [1] * len(values)}
    bucket = dict(columns="x", encoding="bucket")
    bucket |= dict(buckets=9) if fitted else dict(boundaries=boundaries)
    features = dict(categorical=[bucket, dict(columns="y", encoding="integer", rows=3)])
    learned = {"x": np.array(boundaries)} if fitted else None
    encoder = make_encoder(columns, boundaries=learned, **features)
    rows = encoder.encode(make_chunk(columns)).ids
    assert rows[:, 0].tolist() == [row_by_hand(v, boundaries) for v in values]
    assert rows[:, 1].tolist() == [1] * len(values)
    assert encoder.statistics.summary()["categorical"]["x"]["missing"] == 1
    schema = build_schema(make_spec(columns, **features), {}, {}, {}, learned)
    table = schema.tables[0]
    assert (table.name, table.rows, table.encoding) == ("x", 2 + 5, "bucket")
    moved = {"x": np.array([*boundaries[:3], 8.0])}
    features["categorical"][0] = dict(columns="x", encoding="bucket", buckets=9)
    other = build_schema(make_spec(columns, **features), {}, {}, {}, moved)
    assert other.tables[0].checksum != table.checksum


def test_a_bad_number_has_no_bucket():
    columns = {"click": ["1", "0"], "x": ["1", "a"]}
    encoder = make_encoder(
        columns, categorical=[dict(columns="x", encoding="bucket", boundaries=[1])]
    )
    for run in (encoder.encode, encoder.check):
        with pytest.raises(InputError, match=r"row 2, column x: must be a finite number.*'a'"):
            run(make_chunk(columns))


def test_features_of_one_table_may_be_hashed_with_salts_of_their_own():
    columns = {"click": [1, 0], "ad": ["a", "b"], "seen": [["a", "b"], ["b"]]}
    hashed = dict(table="item", encoding="hash", rows=1000)

    def features(first, second):
        return dict(
            categorical=[dict(columns="ad", salt=first, **hashed)],
            ragged=[dict(columns="seen", salt=second, **hashed)],
        )

    def row(text):
        return 2 + xxhash.xxh64_intdigest(text.encode()) % 998

    block = encode(columns, **features("u:", "v:"))
    assert block.ids[:, 0].tolist() == [row("u:a"), row("u:b")]
    assert block.list_values.tolist() == [row("v:a"), row("v:b"), row("v:b")]
    salts = [("u:", "v:"), ("v:", "u:"), ("u:", "u:"), ("u:v:", ""), ("", "")]
    schemas = [build_schema(make_spec(columns, **features(*s)), {}, {}, {}) for s in salts]
    assert len({s.tables[0].checksum for s in schemas}) == len(salts)
    assert [len(s.tables) for s in schemas] == [1] * len(salts)
    # As in stores that were made when a table had one salt.
    assert schemas[2].tables[0].checksum == xxhash.xxh3_64_hexdigest(b"u:")


# Rejected values, and counts.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(tasks=[dict(name="a")]), r"tasks\[0\].label: must be the name of a column, unless"),
        (
            dict(tasks=[BUY]),
            r"features.time: must be the name of the column of events' times, which feat",
        ),
        (dict(tasks=[BUY | dict(window_hours=0)], time="at"), r"window_hours: must be above 0.*0"),
        (dict(tasks=[CLICK | dict(window_hours=1)]), r"window_hours: must be 0 where.*found 1\.0"),
        (
            dict(tasks=[CLICK | dict(window_hours="1")]),
            r"window_hours: must be a number: found '1'",
        ),
        (dict(tasks=[BUY], time="at", as_of="soon"), r"features.as_of: must be a time.*'soon'"),
        (dict(as_of="2024-05-01"), r"features.as_of: must be empty where no task has a `time`"),
        (dict(by_day=True), r"features.time: must be the name of the column of times with by_day"),
        (
            dict(tasks=[CLICK | dict(negative_rate=0)]),
            r"negative_rate: must be at least 1e-38.*: found 0",
        ),
        (dict(tasks=[CLICK | dict(negative_rate=1.5)]), r"negative_rate: must be.*: found 1\.5"),
        (
            dict(tasks=[CLICK | dict(negative_rate=float("nan"))]),
            r"negative_rate: must be a finite number",
        ),
        (
            dict(tasks=[CLICK | dict(negative_rate=0.5, negative_rate_column="r")]),
            r"negative_rate: must be 1 where negative_rate_column gives the rate: found 0\.5",
        ),
        (
            dict(tasks=[CLICK | dict(negative_correction="both")]),
            r"negative_correction: must be one of 'weight', 'shift': found 'both'",
        ),
        (
            dict(categorical=[dict(columns="x", encoding="bucket")]),
            r"buckets: must be from 2 to 65536",
        ),
        (
            dict(categorical=[dict(columns="x", encoding="bucket", boundaries=[1, 1 + 1e-12])]),
            r"categorical\[0\].boundaries: must be rising, as float32",
        ),
        (
            dict(categorical=[dict(columns="x", encoding="bucket", boundaries=[1], buckets=3)]),
            r"categorical\[0\].buckets: must be 0 where `boundaries` are given",
        ),
        (
            dict(categorical=[dict(columns="x", encoding="bucket", buckets=3, length=2)]),
            r"categorical\[0\].length is read only where .*: found 2, .*'bucket'. Leave it at 1",
        ),
        (
            dict(categorical=[dict(columns="x", buckets=3)]),
            r"categorical\[0\].buckets is read only where .*bucket",
        ),
        (
            dict(categorical=[dict(columns="x", boundaries=[3])]),
            r"categorical\[0\].boundaries is read only where",
        ),
        (
            dict(categorical=[dict(columns=["x", "y"], table="t", encoding="bucket", buckets=3)]),
            r"a table of encoding='bucket' must have one feature: found x and y in the table 't'",
        ),
        (
            dict(categorical=[dict(columns="x", encoding="hash", rows=9, max_rows=3)]),
            r"categorical\[0\].max_rows is read only where .*: found 3, .*'hash'",
        ),
        (
            dict(categorical=[dict(columns="x"), dict(columns="y", table="x", max_rows=3)]),
            r"share the table 'x', so max_rows must be the same: found 0 and 3",
        ),
        (
            dict(ragged=[dict(columns="x", encoding="bucket")]),
            r"ragged\[0\].encoding: must be one of 'vocabulary', 'hash', 'integer': found 'bucket'",
        ),
    ],
)
def test_a_features_section_that_cannot_be_is_rejected(change, message):
    with pytest.raises(InputError, match=message):
        make_spec(["click", "at", "bought", "x", "y", "r"], **change)


@pytest.mark.parametrize("field", ["negative_rate_column", "time"])
def test_a_column_that_a_task_names_must_be_there_and_no_pattern_takes_it(field):
    columns = ["click", "f_at", "f_r", "f_x"]
    task = CLICK | {field: "f_r"} | (dict(window_hours=1) if field == "time" else {})
    features = dict(tasks=[task], dense=[dict(columns="f_*")], time="f_at")
    assert [f.name for f in make_spec(columns, **features).dense] == ["f_x"]
    features["tasks"] = [task | {field: "f_y"}]
    with pytest.raises(InputError, match=rf"tasks\[0\].{field}: the data has no column 'f_y'"):
        make_spec(columns, **features)


def test_examples_count_once_though_a_record_beside_them_is_rejected():
    columns = {
        "click": [1, 0, 1],
        "tags": [["a"], ["b", "c"], []],
        "x": [0.5, 1.5, 2.5],
        "user": pa.array([0, 7, None], "i4"),
    }
    features = dict(
        ragged=[dict(columns="tags", encoding="hash", rows=9)],
        dense=[dict(columns="x")],
        categorical=[dict(columns="user", encoding="integer", rows=5)],
    )
    encoder = make_encoder(columns, **features)
    chunk, block = Rejects("skip", 5).attempt(make_chunk(columns), encoder.encode)
    assert block.rows == chunk.batch.num_rows == 2
    good = {name: [pa.array(v).to_pylist()[i] for i in (0, 2)] for name, v in columns.items()}
    good["user"] = pa.array(good["user"], "i4")
    alone = make_encoder(good, **features)
    alone.encode(make_chunk(good))
    assert encoder.statistics.summary() == alone.statistics.summary()
    assert encoder.statistics.summary()["categorical"]["user"]["missing"] == 1


def test_a_section_with_all_defaults_in_full_is_the_same_section():
    short = FeatureSpec.from_state(dict(tasks=[CLICK]))
    (task,) = short.tasks
    assert dataclasses.asdict(task) == dict(
        name="click", label="click", kind="binary", mask="", weight="", truth="",
        negative_rate=1.0, negative_rate_column="", negative_correction="weight",
        time="", window_hours=0.0,
    )  # fmt: skip
    assert FeatureSpec.from_state(short.to_state()) == short
    whole = dict(tasks=[CLICK | dict(negative_rate=1)])  # an int in place of a float
    assert FeatureSpec.from_state(whole) == short
