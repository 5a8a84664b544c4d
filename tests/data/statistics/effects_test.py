import numpy as np
import pytest

from jaxrank.data.examples import Examples
from jaxrank.data.statistics.prior import effects, variance_scale
from jaxrank.data.statistics.prior.residuals import constant_outputs, prepare_labels, residuals
from jaxrank.features import PAD, Categorical, Ragged, Schema, Table, Task

ROWS = 40_000


def deviations(blocks, schema):
    return effects.prior(blocks, schema).ids


def block(ids, labels, lists=None, dense=None):
    lengths, values = lists or (np.zeros((len(ids), 0), np.int32), np.zeros(0, np.int32))
    return Examples(
        dense=np.zeros((len(ids), 0), np.float32) if dense is None else dense,
        ids=ids.astype(np.int32),
        list_lengths=lengths,
        list_values=values,
        list_weights=None,
        labels=labels.astype(np.float32),
    )


def schema(names, lists=(), tasks=("click",)):
    return Schema(
        tasks=tuple(task if isinstance(task, Task) else Task(task) for task in tasks),
        dense=(),
        categorical=tuple(Categorical(name, name) for name in names),
        ragged=tuple(Ragged(name, name, combiner="sum") for name in lists),
        tables=tuple(Table(name, 1000, "integer") for name in (*names, *lists)),
    )


@pytest.fixture(scope="module")
def drawn():
    """Returns ids of three features. The effects of the first two have deviation 1 and 0.3."""
    rng = np.random.default_rng(0)
    sizes = (30, 200, 1000)
    ids = np.stack([rng.integers(0, n, ROWS) for n in sizes], axis=1)
    log_odds = -1 + rng.normal(0, 1.0, 30)[ids[:, 0]] + rng.normal(0, 0.3, 200)[ids[:, 1]]
    return ids, rng.random(ROWS) < 1 / (1 + np.exp(-log_odds))


def test_deviations_are_those_of_the_planted_effects(drawn, monkeypatch):
    ids, labels = drawn
    parts = [block(ids[:5000], labels[:5000, None]), block(ids[5000:], labels[5000:, None])]
    monkeypatch.setattr(effects, "_MIN_FRACTION", 0.0)
    result = deviations(parts, schema("abc"))
    assert result["a"] == pytest.approx(1.0, rel=0.25)
    assert result["b"] == pytest.approx(0.3, rel=0.25)
    assert result["c"] == effects.MIN_VARIANCE**0.5


def labels_of(kind, output, rng):
    """Returns labels, the deviation that they are divided by, and their dispersion."""
    if kind == "count":
        return rng.poisson(np.exp(output)), 1.0, 1.0
    if kind == "many":  # variance 5 + 25 / 2 of a mean of 5
        mean = 5 * np.exp(output)
        noise = 1 + (mean**2).mean() / mean.mean() / 2
        return rng.poisson(mean * rng.gamma(2, 0.5, ROWS)), 1.0, noise
    if kind == "binary":
        return rng.random(ROWS) < 1 / (1 + np.exp(-output)), 1.0, 1.0
    deviation = (output.var() + 1.5**2) ** 0.5
    return 7 + 30 * (output + rng.normal(0, 1.5, ROWS)), deviation, (1.5 / deviation) ** 2


@pytest.mark.parametrize("kind", ["count", "many", "real"])
def test_deviations_for_other_kinds_are_in_units_of_their_outputs(kind, monkeypatch):
    monkeypatch.setattr(effects, "_MIN_FRACTION", 0.0)
    rng = np.random.default_rng(0)
    ids = np.stack([rng.integers(0, n, ROWS) for n in (60, 200, 1000)], axis=1)
    output = rng.normal(0, 0.6, 60)[ids[:, 0]] + rng.normal(0, 0.3, 200)[ids[:, 1]]
    labels, deviation, dispersion = labels_of(kind, output, rng)
    clicks = labels_of("binary", output, rng)[0]
    task = Task("other", "real" if kind == "real" else "count")
    alone = effects.prior([block(ids, labels[:, None])], schema("abc", tasks=[task]))
    assert alone.ids["a"] == pytest.approx(0.6 / deviation, rel=0.25)
    assert alone.ids["b"] == pytest.approx(0.3 / deviation, rel=0.25)
    assert alone.dispersions == {"other": pytest.approx(dispersion, rel=0.1)}
    assert (alone.ids["c"], alone.tasks) == (effects.MIN_VARIANCE**0.5, {})
    both = np.stack([labels, clicks], axis=1)
    result = effects.prior([block(ids, both)], schema("abc", tasks=[task, "click"]))
    assert result.ids["a"] == pytest.approx(0.6, rel=0.25)
    assert result.tasks == {"other": pytest.approx(1 / deviation, rel=0.25)}
    assert result.dispersions == alone.dispersions


def test_labels_with_outliers_have_no_effects_by_chance():
    """A few huge labels are far from chance for a normal distribution, but no evidence."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.integers(0, n, ROWS) for n in (10, 2000)], axis=1)
    for _ in range(5):
        labels = np.exp(rng.normal(0, 3, ROWS))
        result = deviations([block(ids, labels[:, None])], schema("ab", tasks=[Task("x", "real")]))
        assert set(result.values()) == {effects.MIN_VARIANCE**0.5}


@pytest.mark.parametrize(("kind", "shift"), [("binary", 0), ("count", 0.7), ("real", 0.7)])
def test_residuals_by_a_constant_vary_as_by_chance(kind, shift):
    """Unknown labels have none. The intercept is refitted, exactly for counts and real labels."""
    rng = np.random.default_rng(0)
    labels = labels_of(kind, np.full(ROWS, -1.0), rng)[0].astype(np.float64)
    labels[:100] = np.nan
    prepared = prepare_labels(labels, kind)
    outputs = constant_outputs(prepared) + shift
    result = residuals(outputs, prepared)
    assert abs(result.score.sum()) < 1e-6 * result.variance.sum()
    assert not result.score[:100].any()
    assert not result.variance[:100].any()
    assert (result.score**2).sum() == pytest.approx(result.variance.sum(), rel=1e-6)
    assert result.dispersion == pytest.approx(1, rel=0.05)


def variance_by_chance(labels, ids):
    """Returns two standard errors of the variance of the effects of equally frequent ids."""
    information = len(labels) / ids * labels.mean() * (1 - labels.mean())
    return 2 * (2 / ids) ** 0.5 / information


@pytest.mark.parametrize("kind", ["explained", "in pairs", "uncertain", "without effect"])
def test_the_least_is_for_features_that_may_have_effects(drawn, kind, monkeypatch):
    """Features that others explain, any beside pairs, and one of which little is known."""
    ids, labels = drawn
    rng, rows = np.random.default_rng(1), 1000 if kind == "uncertain" else ROWS
    if kind == "explained":
        ids = ids[:, [0, 1, 0]]
    if kind == "in pairs":
        labels = labels ^ ((ids[:, 0] + ids[:, 1]) % 2 & (rng.random(ROWS) < 0.2))
    parts = [block(ids[:rows], labels[:rows, None])]
    result = deviations(parts, schema("abc"))
    monkeypatch.setattr(effects, "_MIN_FRACTION", 0.0)
    mean = np.mean(np.square(list(deviations(parts, schema("abc")).values())))
    least = variance_by_chance(labels, 1000) if kind == "without effect" else 0.7 * mean
    assert result["c"] == pytest.approx(least**0.5, rel=0.05)


def test_lists_unknown_labels_and_missing_ids_are_counted_as_they_are(drawn):
    ids, labels = drawn
    lengths = np.ones((ROWS, 1), np.int32)
    as_list = deviations(
        [block(ids[:, :0], labels[:, None], (lengths, ids[:, 0].astype(np.int32)))],
        schema("", "l"),
    )
    as_id = deviations([block(ids[:, :1], labels[:, None])], schema("a"))
    assert as_list["l"] == pytest.approx(as_id["a"])
    more = np.concatenate([ids[:, :1], np.full((100, 1), PAD), ids[:100, :1]])
    unknown = np.concatenate([labels, labels[:100], np.full(100, np.nan)])
    kept = np.concatenate([labels, np.full(200, np.nan)])
    with_unknown, without = (
        deviations([block(more, y[:, None])], schema("a")) for y in (unknown, kept)
    )
    assert without["a"] == pytest.approx(as_id["a"])
    assert with_unknown["a"] == pytest.approx(as_id["a"], rel=0.01)


@pytest.mark.parametrize(
    ("deviation", "groups", "factor"),
    [(2.0, [10, 20, 50, 100], 2), (2.0, [], 2), (0.5, [10, 20, 50, 100], 1), (0.5, [], 1)],
)
def test_variances_that_are_too_small_get_a_factor(deviation, groups, factor, monkeypatch):
    """Variances of large effects are too small, more so where groups contain the ids."""
    generator = np.random.default_rng(5)
    small = generator.integers(0, 3000, 12_000)
    effect = generator.normal(0, deviation, 3000)[small]
    labels = (generator.random(12_000) < 1 / (1 + np.exp(1 - effect))).astype(np.float64)
    ids = np.stack([small, *(small // size for size in groups)], axis=1)

    def found():
        return deviations([block(ids, labels[:, None])], schema("abcde"[: ids.shape[1]]))["a"]

    chosen = found()
    monkeypatch.setattr(variance_scale, "FACTORS", (1.0,))
    assert chosen == pytest.approx(found() * factor**0.5)


def test_labels_that_are_all_equal_give_the_least_deviation(drawn):
    """A task of such labels does not change the deviations of the others."""
    ids, labels = drawn
    dense = ids[:, :1].astype(np.float32)
    both = np.stack([labels, np.ones(ROWS)], axis=1)
    result = effects.prior([block(ids, both, dense=dense)], schema("abc", tasks=("click", "buy")))
    assert result == effects.prior([block(ids, labels[:, None], dense=dense)], schema("abc"))
    assert set(deviations([block(ids, both[:, 1:])], schema("abc")).values()) == {
        effects.MIN_VARIANCE**0.5
    }


@pytest.mark.parametrize(
    ("effect", "scale", "deviation"),
    [(0.2, 1.0, 0.2), (0.2, 1000.0, 0.2), (2.0, 1.0, 0.2**0.5), (0.0, 1.0, 0.0005**0.5)],
)
def test_the_variance_of_numbers_is_that_per_deviation_within_limits(effect, scale, deviation):
    rng = np.random.default_rng(0)
    dense = rng.normal(5, 1, (ROWS, 2))
    labels = rng.random(ROWS) < 1 / (1 + np.exp(1 - effect * (dense - 5).sum(axis=1)))
    dense = np.concatenate([scale * dense, np.ones((ROWS, 1))], axis=1).astype(np.float32)
    ids = rng.integers(0, 50, (ROWS, 1))
    estimated = effects.prior([block(ids, labels[:, None], dense=dense)], schema("a"))
    assert estimated.numbers == pytest.approx(deviation, rel=0.15)
    allowed = np.inf if estimated.has_pairs else variance_by_chance(labels, 50)
    least = max(min(0.2 * estimated.numbers**2, allowed), effects.MIN_VARIANCE)
    assert estimated.ids == {"a": pytest.approx(least**0.5, rel=0.05)}


@pytest.mark.parametrize("kind", ["ids", "number", "none", "one column"])
def test_pairs_have_effects_only_where_they_are_planted(kind):
    """Effects of single features leave none for pairs, whether they are fitted or shrunken."""
    rng = np.random.default_rng(3)
    sizes = (8, 12, 400)
    ids = np.stack([rng.integers(0, n, ROWS) for n in sizes], axis=1)
    dense = rng.normal(size=(ROWS, 1)).astype(np.float32)
    log_odds = -2 + sum(rng.normal(0, 0.5, n)[ids[:, i]] for i, n in enumerate(sizes))
    if kind == "ids":
        log_odds += rng.normal(0, 0.4, (8, 12))[ids[:, 0], ids[:, 1]]
    if kind == "number":
        log_odds += rng.normal(0, 0.4, 8)[ids[:, 0]] * dense[:, 0]
    labels = rng.random(ROWS) < 1 / (1 + np.exp(-log_odds))
    names = "abc"
    if kind == "one column":
        ids, names, dense = ids[:, :1], "a", None
    parts = [block(ids, labels[:, None], dense=dense)]
    assert effects.prior(parts, schema(names)).has_pairs == (kind in ("ids", "number"))


def test_single_clicks_of_rare_ids_are_no_effect():
    """An unlikely click of an id that was read once is far from chance, but no evidence."""
    rng = np.random.default_rng(0)
    for _ in range(5):
        ids = np.stack([rng.integers(0, 10, ROWS), rng.integers(0, 20_000, ROWS)], axis=1)
        log_odds = -7 + np.linspace(-3, 3, 10)[ids[:, 0]]
        labels = rng.random(ROWS) < 1 / (1 + np.exp(-log_odds))
        result = deviations([block(ids, labels[:, None])], schema("ab"))
        assert result["a"] > 1.2
        assert result["b"] < (0.55 * result["a"] ** 2) ** 0.5  # half: the mean of a and 0


def test_no_feature_stands_out_by_chance():
    """The largest of many estimates is two standard errors above 0 now and then."""
    rng = np.random.default_rng(0)
    names = "abcdefgh"
    for _ in range(6):
        ids = rng.integers(0, 12, (ROWS, len(names)))
        labels = rng.random(ROWS) < 0.005
        result = deviations([block(ids, labels[:, None])], schema(names))
        assert max(result.values()) < 1.2 * min(result.values())


@pytest.mark.parametrize("fraction", [0.0, 0.7])
def test_features_of_a_single_id_do_not_change_the_others(drawn, monkeypatch, fraction):
    """Neither by the mean that uncertain features are shrunk to, nor by the least deviation."""
    monkeypatch.setattr(effects, "_MIN_FRACTION", fraction)
    ids, labels = drawn
    dense = np.zeros((300, 1), np.float32)
    few = effects.prior([block(ids[:300], labels[:300, None], dense=dense)], schema("abc"))
    more = np.pad(ids[:300], ((0, 0), (0, 9)))
    many = effects.prior([block(more, labels[:300, None], dense=dense)], schema("abcdefghijkl"))
    assert {name: many.ids[name] for name in "abc"} == pytest.approx(few.ids)
    assert many.numbers == pytest.approx(few.numbers)
    assert few.ids["a"] > effects.MIN_VARIANCE**0.5
