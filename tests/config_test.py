import json
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from ml_collections import ConfigDict

from jaxrank import config, config_files
from jaxrank.errors import InputError
from jaxrank.models.ranker import Ranker
from jaxrank.validate import matched

CONFIGS = ROOT / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_config_differs_from_the_defaults_as_recorded(name):
    """Golden text: what a config sets, long lines cut. After a change that is meant, write the new
    text."""
    found = config_files.differences(
        config_files.to_plain(config.default()),
        config_files.to_plain(config_files.load(CONFIGS / f"{name}.py")),
    )
    golden = Path(__file__).parent / "golden" / f"{name}.txt"
    assert [line[:4000] for line in found] == golden.read_text().splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_a_config_survives_being_saved_with_a_run(name):
    loaded = config_files.load(CONFIGS / f"{name}.py")
    plain = json.loads(json.dumps(config_files.to_plain(loaded)))
    assert config_files.to_plain(config_files.from_plain(plain)) == plain
    assert isinstance(config_files.from_plain(plain).model.hidden, tuple)


def test_a_config_may_import_what_puts_other_things_than_modules_among_them(tmp_path):
    """As torch does."""
    path = tmp_path / "odd.py"
    path.write_text(
        "import sys\nimport types\nfrom jaxrank.config import default\n\n\n"
        "class Odd(types.ModuleType):\n"
        "    def __getattr__(self, name):\n        return 3\n\n\n"
        'sys.modules["odd_of_a_test"], sys.modules["none_of_a_test"] = Odd("odd"), None\n'
        "get_config = default\n"
    )
    try:
        assert config_files.load(path).seed == 0
    finally:
        for name in ("odd_of_a_test", "none_of_a_test"):
            sys.modules.pop(name, None)


def test_a_config_gets_the_neighbours_that_lie_beside_it_now(tmp_path):
    text = (
        "import neighbour, linked, package.inner, bare.inner\n"
        "from jaxrank.config import default\n\n"
        "def get_config():\n    c = default()\n    c.seed = neighbour.SEED\n"
        "    c.batch_size = package.inner.SIZE\n    c.num_steps = linked.SEED\n"
        "    c.eval.batch_size = bare.inner.SIZE\n    return c\n"
    )

    def write(folder, seed, size):
        for package in ("package", "bare"):
            (tmp_path / folder / package).mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / package / "inner.py").write_text(f"SIZE = {size}")
        (tmp_path / folder / "config.py").write_text(text)
        (tmp_path / folder / "neighbour.py").write_text(f"SEED = {seed}")
        (tmp_path / folder / "package" / "__init__.py").write_text("")
        (tmp_path / f"elsewhere_{folder}.py").write_text(f"SEED = {seed}")
        (tmp_path / folder / "linked.py").unlink(missing_ok=True)
        (tmp_path / folder / "linked.py").symlink_to(tmp_path / f"elsewhere_{folder}.py")

    def found(folder):
        c = config_files.load(tmp_path / folder / "config.py")
        assert (c.num_steps, c.eval.batch_size) == (c.seed, c.batch_size)
        return c.seed, c.batch_size

    write("a", 1, 16)
    write("b", 2, 32)
    assert (found("a"), found("b")) == ((1, 16), (2, 32))
    write("a", 300, 6400)  # of another size, for Python looks at size and second of a file
    assert found("a") == (300, 6400)
    assert "neighbour" not in sys.modules


@pytest.mark.parametrize("override", ["seed=99", "--config.seed", "-config.seed=1"])
def test_an_override_that_is_none_is_refused(override):
    with pytest.raises(InputError, match=r"must be --config.FIELD=VALUE: found"):
        config_files.load(CONFIGS / "quickstart.py", [override])


def test_differences_name_each_field_with_both_values():
    old, new = {"a": {"b": 1, "c": 2}, "d": 1}, {"a": {"b": 1, "c": 3}, "e": "x"}
    assert config_files.differences(old, new) == [
        "a.c: 2, now 3",
        'd: 1, now "unset"',
        'e: "unset", now "x"',
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("c.batchsize = 3", "(?s)AttributeError.*batchsize.*batch_size"),
        ("c.data.shard = 4", "(?s)AttributeError.*shard.*shards"),
        ("c.batch_size = 'many'", "TypeError.*batch_size"),
        ("c.batch_size = 0", "batch_size must be at least 1: found 0"),
        ("c.task_weights = (1.0, -1.0)", r"task_weights must be at least 0: found \(1.0, -1.0\)"),
        ("c.task_weights = (float('inf'), 1.0)", r"task_weights must be a finite number: .*inf"),
        (
            "c.eval.rate_factor = 2.0",
            "eval.rate_factor must .* at most 1: found 2.0",
        ),
        ("c.data.on_overflow = 'truncat'", "data.on_overflow must be one of.*'truncate'"),
        ("c = ConfigDict(dict(batch_size=3))", "config: .* is missing. Start from"),
        (
            "c.checkpoint = ConfigDict(dict(every_steps=0, keep=1.5, keep_every_steps=0))",
            "checkpoint.keep must be a whole number: found 1.5",
        ),
        (
            "c.mesh = ConfigDict(dict(devices=True, replicas=1))",
            "mesh.devices must be a whole number: found True",
        ),
        (
            "c.eval = ConfigDict(c.eval.to_dict() | dict(metric=None))",
            "eval.metric must be text: found None",
        ),
        (
            "c.unlock(); c.model = ConfigDict(dict(cros=1))",
            "field: model.cros. .*model.cross",
        ),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named"),
        ("raise SystemExit(0)", "c.py: SystemExit: 0"),
    ],
)
def test_a_config_file_with_a_mistake_is_refused_naming_it(tmp_path, line, message):
    text = "from ml_collections import ConfigDict\nfrom jaxrank.config import default\n"
    text += f"def get_config():\n    c = default()\n    {line}\n    return c\n"
    (tmp_path / "c.py").write_text(text)
    with pytest.raises(InputError, match=message):
        config_files.load(str(tmp_path / "c.py"))


def test_a_file_without_get_config_is_refused(tmp_path):
    (tmp_path / "c.py").write_text("x = 1")
    with pytest.raises(InputError, match="c.py: AttributeError: .*get_config"):
        config_files.load(str(tmp_path / "c.py"))


def test_a_config_may_take_a_text_as_ml_collections_has_it(tmp_path):
    (tmp_path / "c.py").write_text(
        "from jaxrank.config import default\n"
        "def get_config(rows='7'):\n    c = default()\n    c.seed = int(rows)\n    return c\n"
    )
    assert config_files.load(tmp_path / "c.py").seed == 7
    assert config_files.load(f"{tmp_path}/c.py:12").seed == 12
    with pytest.raises(InputError, match="c.py: ValueError: .*many"):
        config_files.load(f"{tmp_path}/c.py:many")


@pytest.mark.parametrize("size", ["", ":small"])
def test_the_heavy_model_has_half_as_many_features_again_and_larger_layers(size):
    """What the models are for: at least 1,000 features of which 200 lists, 300 M parameters."""
    standard, heavy = (config_files.load(f"{CONFIGS}/{n}.py{size}") for n in ("standard", "heavy"))

    def counts(c):
        return c.source.floats, len(c.features.ids), len(c.features.lists)

    def numbers(c):
        dims = config_files.to_plain(c.embedding.dims)
        tables = [(e["columns"], e["rows"]) for e in (*c.features.ids, *c.features.lists)]
        return sum(rows * dims.get(name, c.embedding.dim) for name, rows in tables)

    assert sum(counts(standard)) >= 1000
    assert counts(standard)[2] >= 200
    assert counts(heavy) == tuple(1.5 * n for n in counts(standard))
    assert [len(c.features.tasks) for c in (standard, heavy)] == [2, 2]
    assert {standard.model.multitask, heavy.model.multitask} == {"ple"}
    assert heavy.model.hidden[0] == 2 * standard.model.hidden[0]
    assert heavy.model.cross_layers > standard.model.cross_layers
    assert heavy.embedding.dim > standard.embedding.dim
    if not size:
        assert numbers(standard) >= 300_000_000
        assert numbers(heavy) > 2 * numbers(standard)


def test_small_models_have_the_layers_of_the_whole_ones():
    for name in ("standard", "heavy"):
        whole, small = (config_files.load(f"{CONFIGS}/{name}.py{size}") for size in ("", ":small"))
        assert config_files.to_plain(whole.model) == config_files.to_plain(small.model)
        assert config_files.to_plain(whole.embedding) == config_files.to_plain(small.embedding)


def test_patterns_in_another_order_are_another_config():
    old, new = config.default(), config.default()
    old.optim.tables.factors = ConfigDict({"c0": 0.0, "*": 1.0})
    new.optim.tables.factors = ConfigDict({"*": 1.0, "c0": 0.0})
    assert config_files.differences(config_files.to_plain(old), config_files.to_plain(new)) == [
        "optim.tables.factors: patterns in the order c0, *, now *, c0"
    ]
    assert config_files._set_by_name(old, "optim.tables.factors.c0", "0.0")
    assert config_files.differences(config_files.to_plain(old), config_files.to_plain(new)) == []


def test_of_several_patterns_the_last_one_counts_whatever_their_names():
    c = config.default()
    c.optim.dense.factors = ConfigDict({"cross/*": 0.1, "*/bias": 0.0})
    c.embedding.dims = ConfigDict({"user": 8, "*": 4})
    saved = json.loads(json.dumps(config_files.to_plain(c)))
    for found in (c, config_files.from_plain(saved)):
        factors = config_files.to_plain(found.optim.dense)["factors"]
        assert matched("factors", "parameter", ["cross/bias", "cross/a"], factors) == {
            "cross/bias": 0.0,
            "cross/a": 0.1,
        }
        dims = config_files.to_plain(found.embedding.dims)
        assert matched("embedding.dims", "table", ["user", "ad"], dims) == {"user": 4, "ad": 4}


def test_a_model_has_the_defaults_of_the_config_where_a_program_gives_none():
    fields = dict(config.default().model) | {"parents": ()}  # tasks by name there, here by index
    assert {name: getattr(Ranker, name) for name in fields} == fields
