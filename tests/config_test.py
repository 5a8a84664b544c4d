import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import flax.linen as nn
import pytest
from checkout import ROOT
from ml_collections import ConfigDict

from jaxrank import config, config_files, config_reference, optim
from jaxrank.errors import InputError
from jaxrank.models import registry
from jaxrank.validate import matched

CONFIGS = ROOT / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_config_differs_from_the_defaults_as_recorded(name):
    """Golden text: what a config sets, long lines cut. After a change that is meant, write the new
    text."""
    lines = config_files.differences(
        config_files.to_plain(config.default()),
        config_files.to_plain(config_files.load(CONFIGS / f"{name}.py")),
    )
    golden = Path(__file__).parent / "golden" / f"{name}.txt"
    assert [line[:4000] for line in lines] == golden.read_text().splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_a_config_survives_being_saved_with_a_run(name):
    loaded = config_files.load(CONFIGS / f"{name}.py")
    plain = json.loads(json.dumps(config_files.to_plain(loaded)))
    assert config_files.to_plain(config_files.from_plain(plain)) == plain
    assert isinstance(config_files.from_plain(plain).model.mlp_units, tuple)


def test_a_config_may_import_what_puts_other_things_than_modules_among_them(tmp_path):
    """PyTorch adds such objects to `sys.modules`."""
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

    def load_numbers(folder):
        c = config_files.load(tmp_path / folder / "config.py")
        assert (c.num_steps, c.eval.batch_size) == (c.seed, c.batch_size)
        return c.seed, c.batch_size

    write("a", 1, 16)
    write("b", 2, 32)
    assert (load_numbers("a"), load_numbers("b")) == ((1, 16), (2, 32))
    write("a", 300, 6400)  # of another size, for Python looks at size and second of a file
    assert load_numbers("a") == (300, 6400)
    assert "neighbour" not in sys.modules


@pytest.mark.parametrize("override", ["seed=99", "--config.seed", "-config.seed=1"])
def test_an_override_that_is_none_is_rejected(override):
    with pytest.raises(InputError, match=r"must be --config.FIELD=VALUE: found"):
        config_files.load(CONFIGS / "quickstart.py", [override])


@pytest.mark.parametrize(
    ("override", "must"),
    [
        ("optim.tables.base_learning_rate=abc", "a number: found 'abc'"),
        ("batch_size=1.5x", "a whole number: found '1.5x'"),
        ("data.direct=maybe", "True or False: found 'maybe'"),
    ],
)
def test_an_override_of_another_type_is_rejected(override, must):
    with pytest.raises(InputError, match=rf"^--config.{override}: must be {must}\.$"):
        config_files.load(CONFIGS / "quickstart.py", [f"--config.{override}"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("embedding.init_from=/a", r"embedding.init_from: .*init_from.NAME=VALUE: found '/a'\.$"),
        ("optim.dense=adam", r"optim.dense: must set a field, .*optim.dense.\w+=VALUE: .*'adam'"),
    ],
)
def test_an_override_of_a_section_is_rejected(override, message):
    with pytest.raises(InputError, match=message):
        config_files.load(CONFIGS / "quickstart.py", [f"--config.{override}"])


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
        ("c.batchsize = 3", r"c.py:5: batchsize: must be .* no .*\. Did you mean batch_size\?$"),
        ("c['batchsize'] = 3", r"c.py:5: batchsize: .* Did you mean batch_size\?$"),
        ("d = c.data; d.shard = 4", r"c.py:5: data.shard: .*\. Did you mean data.shards\?$"),
        ("c.update(optim=dict(dense=dict(warmup=1)))", r"5: optim.dense.warmup: .*warmup_steps\?$"),
        ("c.optimm.dense.decay = ''", r"c.py:5: optimm: .* Did you mean optim\?$"),
        ("c.watch.nothing_near = 1", r"watch.nothing_near: .* The fields are .*, .*on_nonfinite"),
        ("c.batch_size = 'many'", "TypeError.*batch_size"),
        ("c.batch_size = -1", r"batch_size: must be at least 0: found -1\. See .*c\.py:5\.$"),
        ("c.task_weights = (1.0, -1.0)", r"task_weights\[1\]: must be at least 0: found -1.0"),
        (
            "c.task_weights = (float('inf'), 1.0)",
            r"task_weights\[0\]: must be a finite number: .*inf",
        ),
        (
            "c.eval.reduce_lr_factor = 2.0",
            "eval.reduce_lr_factor: must .* at most 1: found 2.0",
        ),
        ("c.data.on_overflow = 'truncat'", "data.on_overflow: must be one of.*'truncate'"),
        ("c = ConfigDict(dict(batch_size=3))", "config: .* is missing. Start from"),
        (
            "c.checkpoint = ConfigDict(dict(c.checkpoint, keep=1.5))",
            "checkpoint.keep: must be a whole number: found 1.5",
        ),
        ("c.batch_size = 10**30", r"batch_size: must be a number of 64 bits: found 10+\."),
        (
            "c.mesh = ConfigDict(dict(devices=True, replicas=1))",
            "mesh.devices: must be a whole number: found True",
        ),
        (
            "c.model.unlock(); c.model = ConfigDict(dict(c.model, name=3))",
            "model.name: must be one of .*: found 3",
        ),
        (
            "c.eval = ConfigDict(c.eval.to_dict() | dict(metric=None))",
            "eval.metric: must be text: found None",
        ),
        (
            "c.unlock(); c.model = ConfigDict(dict(cros=1))",
            "model.cros: .*model.cross",
        ),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named"),
        ("raise SystemExit(0)", "c.py:5: SystemExit: 0"),
        ("{'user': 1}['item']", "c.py:5: KeyError: 'item'"),
        ("c.source = 1 / 0", "c.py:5: ZeroDivisionError: division by zero"),
        ("default('nosuch')", "c.py:5: .*nosuch"),
        ("c.features.nosuch = 1", "c.py:5: features.nosuch: must be a field of features"),
        ("c.model.nosuch = 1", "c.py:5: model.nosuch: must be a field of model"),
        ("import json; json.loads('x')", "c.py:5: JSONDecodeError"),
        (
            "c.source.kind = 'csv'; c.source.files.train = 'a'",
            r"c.py:5: source.files: must be set as a whole .* Set source.files, such as source",
        ),
    ],
)
def test_a_config_file_with_a_mistake_is_rejected_naming_it(tmp_path, line, message):
    text = "from ml_collections import ConfigDict\nfrom jaxrank.config import default\n"
    text += f"def get_config():\n    c = default()\n    {line}\n    return c\n"
    (tmp_path / "c.py").write_text(text)
    with pytest.raises(InputError, match=message):
        config_files.load(str(tmp_path / "c.py"))


@pytest.mark.parametrize(
    ("message", "overrides", "place"),
    [
        ("eval.metric: must be a metric.", [], " See {}:4."),
        ("source: no such file.", [], " See {}:4."),
        ("eval.metric: must be a metric.", ["--config.eval.metric=x"], ""),
        ("batch_size, eval: must be.", [], ""),
        ("source, eval: must be.", [], " See {}:4."),
        ("metric.csv, row 2: no number.", [], ""),
        ("a run with eval.metric failed.", [], ""),
    ],
)
def test_a_later_error_about_a_field_names_the_lines_that_set_it(
    tmp_path, message, overrides, place
):
    file = tmp_path / "c.py"
    file.write_text(
        "from jaxrank.config import default\ndef get_config():\n    c = default()  # metric\n"
        "    c.source.kind = 'csv'; c.eval.metric = 'click/acu'\n    return c\n"
    )
    config, sources = config_files.load_with_sources(str(file))
    with (
        pytest.raises(InputError) as raised,
        config_files.naming_lines(config, sources, overrides),
    ):
        raise InputError(message)
    assert str(raised.value) == message + place.format(file)


_NEIGHBOUR = """from jaxrank.config import default
def start():
    c = default()
    c.batch_size, c.embedding.dim = 512, 16
    c.features.dense = [dict(columns="a", log=False)]
    return c
"""


@pytest.mark.parametrize(
    ("lines", "field", "places"),
    [
        (["c.batch_size = -1"], "batch_size", ["c.py:4"]),
        (["d = c.embedding", "d['dim'] = -3"], "embedding.dim", ["c.py:5"]),
        (["values = {'dim': -3}", "c.embedding.update(values)"], "embedding.dim", ["c.py:5"]),
        (["c.update(embedding=dict(", "dim=-3))"], "embedding.dim", ["c.py:5"]),
        (
            ["c.features.dense = [", "dict(columns='a'),", "dict(columns='b', log=1)]"],
            "features.dense[1].log",
            ["c.py:6"],
        ),
        (["c.embedding.dim = -3"], "batch_size", ["neighbour.py:4"]),
        (["c.embedding.dim = 4"], "features.dense[0].log", ["neighbour.py:5"]),
        (["c = c.copy_and_resolve_references()"], "batch_size", ["neighbour.py:4"]),
        (["c.batch_size = 4"], "eval.metric", []),
    ],
)
def test_the_line_that_set_a_field_last_is_named(tmp_path, lines, field, places):
    (tmp_path / "neighbour.py").write_text(_NEIGHBOUR)
    body = "".join(f"    {line}\n" for line in ["c = neighbour.start()", *lines, "return c"])
    (tmp_path / "c.py").write_text(f"import neighbour\ndef get_config():\n{body}")
    _, sources = config_files._loaded(tmp_path / "c.py")
    assert [place.rpartition("/")[2] for place in sources.lines(field)] == places


def test_a_file_may_change_where_it_imports_from(tmp_path):
    text = "import sys\nfrom jaxrank.config import default as get_config\nsys.path.pop(0)\n"
    (tmp_path / "c.py").write_text(text)
    config_files.load(str(tmp_path / "c.py"))
    assert str(tmp_path) not in sys.path


def test_a_file_without_get_config_is_rejected(tmp_path):
    (tmp_path / "c.py").write_text("x = 1")
    with pytest.raises(InputError, match=r"c.py: must define get_config\(\): found no such"):
        config_files.load(str(tmp_path / "c.py"))


_START = "from jaxrank.config import default\ndef rows():\n    c = default()\n"


@pytest.mark.parametrize(
    ("neighbour", "message"),
    [
        ("def rows():\n    return {}['item']\n", r"neighbour.py:2: KeyError: 'item'"),
        ("x = 1\ny = 1 / 0\n", r"neighbour.py:2: ZeroDivisionError"),
        ("x = 1\ndef rows(:\n", r"neighbour.py:2: SyntaxError"),
        (
            f"{_START}    c.embedding.dim = -3\n    return c",
            r"dim: .* -3\. See .*neighbour.py:4\.$",
        ),
        (
            f"{_START}    c.features.tasks = [dict(name='x', lbael='y')]\n    return c",
            r"tasks\[0\].lbael: .*\.label\? See .*neighbour.py:4\.$",
        ),
    ],
)
def test_an_error_in_a_file_that_a_config_imports_names_its_line(tmp_path, neighbour, message):
    (tmp_path / "neighbour.py").write_text(neighbour)
    text = "import neighbour\ndef get_config():\n    return neighbour.rows()\n"
    (tmp_path / "c.py").write_text(text)
    with pytest.raises(InputError, match=message):
        config_files.load(str(tmp_path / "c.py"))


def test_a_loss_may_change_from_a_name_to_a_section_and_a_source_get_its_files(tmp_path):
    lines = ["c.task_losses.click = 'bce'", "c.task_losses.click = dict(name='focal', gamma=1.0)"]
    lines += ["c.task_losses.buy = dict(name='focal')", "c.task_losses.buy = 'bce'"]
    text = "\n    ".join(["def get_config():", "c = default()", *lines, "c.source.kind = 'csv'"])
    (tmp_path / "c.py").write_text(f"from jaxrank.config import default\n{text}\n    return c\n")
    c = config_files.load(tmp_path / "c.py", ["--config.source.files.train=a.csv"])
    assert config_files.to_plain(c.task_losses) == {
        "click": dict(name="focal", gamma=1.0),
        "buy": "bce",
    }
    assert config_files.to_plain(c.source) == {"kind": "csv", "files": {"train": "a.csv"}}


SET_BY_NAME = [
    ('embedding.dims["cat_0"] = 4', "embedding.dims.cat_0=4"),
    ("embedding.placements['c*'] = 'rows'", "embedding.placements.c*=rows"),
    ("optim.dense.settings.b1 = 0.8", "optim.dense.settings.b1=0.8"),
    ("optim.dense.lr_multipliers['cross/*'] = 0.1", "optim.dense.lr_multipliers.cross/*=0.1"),
    ("optim.tables.settings.eps = 1e-6", "optim.tables.settings.eps=1e-6"),
    ("optim.tables.lr_multipliers.t = 0", "optim.tables.lr_multipliers.t=0"),
    ('model.parents["buy"] = "click"', "model.parents.buy=click"),
    ("source.kind = 'csv'", ""),
    ("source.kind = 'csv'; c.source.files = dict(train='a.csv')", ""),
    ("source = dict(kind='csv', files=dict(train='a.csv'))", ""),
    ("features.keep = 'uid'", "features.keep=uid"),
    ("features.categorical = (dict(columns='a'),)", "features.categorical=[dict(columns='a')]"),
    ("features.time_format = 'YYYYMMDD'", "features.time_format=YYYYMMDD"),
    ("task_weights = [1, 2.0]", "task_weights=(1, 2.0)"),
]


def test_the_loss_of_a_task_is_set_by_its_name_and_settings():
    overrides = ["--config.task_losses.click=focal", "--config.task_losses.click.gamma=1"]
    overrides += ["--config.task_losses.like.label_smoothing=0.1"]
    c = config_files.load(CONFIGS / "quickstart.py", overrides)
    plain = config_files.to_plain(c)
    expected = {"click": {"name": "focal", "gamma": 1}, "like": {"label_smoothing": 0.1}}
    assert plain["task_losses"] == expected
    assert config_files.to_plain(config_files.from_plain(plain)) == plain


@pytest.mark.parametrize(("line", "override"), SET_BY_NAME)
def test_a_config_file_sets_what_the_command_line_can(tmp_path, line, override):
    text = "from jaxrank.config import default\ndef get_config():\n    c = default()\n"
    text += "    c.features.tasks = [dict(name='click', label='l')]\n"
    (tmp_path / "plain.py").write_text(text + "    return c\n")
    (tmp_path / "c.py").write_text(text + f"    c.{line}\n    return c\n")
    loaded = config_files.load(tmp_path / "c.py")
    if override:
        try:
            expected = config_files.load(tmp_path / "plain.py", [f"--config.{override}"])
        except InputError:  # a list of dicts is no literal of the command line
            return
        assert config_files.to_plain(loaded) == config_files.to_plain(expected)


def test_a_config_may_take_a_text_as_ml_collections_has_it(tmp_path):
    (tmp_path / "c.py").write_text(
        "from jaxrank.config import default\n"
        "def get_config(rows='7'):\n    c = default()\n    c.seed = int(rows)\n    return c\n"
    )
    assert config_files.load(tmp_path / "c.py").seed == 7
    assert config_files.load(f"{tmp_path}/c.py:12").seed == 12
    with pytest.raises(InputError, match="c.py:4: ValueError: .*many"):
        config_files.load(f"{tmp_path}/c.py:many")


@pytest.mark.parametrize("size", ["", ":small"])
def test_the_heavy_model_has_half_as_many_features_again_and_larger_layers(size):
    """The models have at least 1,000 features, of which 200 lists, and 300 M parameters."""
    standard, heavy = (config_files.load(f"{CONFIGS}/{n}.py{size}") for n in ("standard", "heavy"))

    def counts(c):
        return c.source.dense, len(c.features.categorical), len(c.features.ragged)

    def numbers(c):
        dims = config_files.to_plain(c.embedding.dims)
        tables = [(e["columns"], e["rows"]) for e in (*c.features.categorical, *c.features.ragged)]
        return sum(rows * dims.get(name, c.embedding.dim) for name, rows in tables)

    assert sum(counts(standard)) >= 1000
    assert counts(standard)[2] >= 200
    assert counts(heavy) == tuple(1.5 * n for n in counts(standard))
    assert [len(c.features.tasks) for c in (standard, heavy)] == [2, 2]
    assert {standard.model.multitask, heavy.model.multitask} == {"ple"}
    assert heavy.model.mlp_units[0] == 2 * standard.model.mlp_units[0]
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
    old.optim.tables.lr_multipliers = ConfigDict({"c0": 0.0, "*": 1.0})
    new.optim.tables.lr_multipliers = ConfigDict({"*": 1.0, "c0": 0.0})
    assert config_files.differences(config_files.to_plain(old), config_files.to_plain(new)) == [
        "optim.tables.lr_multipliers: patterns in the order c0, *, now *, c0"
    ]
    assert config_files._set_by_name(old, "optim.tables.lr_multipliers.c0", "0.0")
    assert config_files.differences(config_files.to_plain(old), config_files.to_plain(new)) == []


def test_of_several_patterns_the_last_one_counts_whatever_their_names():
    c = config.default()
    c.optim.dense.lr_multipliers = ConfigDict({"cross/*": 0.1, "*/bias": 0.0})
    c.embedding.dims = ConfigDict({"user": 8, "*": 4})
    saved = json.loads(json.dumps(config_files.to_plain(c)))
    for read in (c, config_files.from_plain(saved)):
        lr_multipliers = config_files.to_plain(read.optim.dense)["lr_multipliers"]
        assert matched(
            "lr_multipliers", "parameter", ["cross/bias", "cross/a"], lr_multipliers
        ) == {
            "cross/bias": 0.0,
            "cross/a": 0.1,
        }
        dims = config_files.to_plain(read.embedding.dims)
        assert matched("embedding.dims", "table", ["user", "ad"], dims) == {"user": 4, "ad": 4}


def runnable(**kwargs):
    """The defaults, with a number of steps and a batch size."""
    c = config.default(**kwargs)
    c.batch_size = 4096
    c.num_steps = 64
    return c


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("data.shards", 0, "must be at least 1: found 0"),
        ("steps_per_execution", 0, "must be at least 1: found 0"),
        ("seed", -1, "must be at least 0 and at most 2147483647: found -1"),
        ("data.window_blocks", 0, "must be at least 1: found 0"),
        ("data.num_workers", -2, "must be at least -1: found -2"),
        ("data.prefetch_batches", -2, "must be at least 0: found -2"),
        ("data.list_slack", -0.5, "must be at least 0: found -0.5"),
        ("data.list_slack", float("nan"), "must be a finite number: found nan"),
        ("data.order", "day", "must be one of 'shuffled', 'days': found 'day'"),
        ("data.on_overflow", "cut", "must be one of 'error', 'truncate': found 'cut'"),
        (
            "optim.dense.scaling",
            "cubic",
            "must be one of 'none', 'sqrt', 'linear', 'sqrt_linear': found 'cubic'",
        ),
        ("optim.tables.decay", "steps", "must be one of '', 'constant', .*: found 'steps'"),
        ("optim.dense.base_batch", -1, "must be at least 0: found -1"),
        ("optim.dense.base_learning_rate", -0.1, "must be at least 0: found -0.1"),
        ("optim.tables.base_learning_rate", float("nan"), "must be a finite number: found nan"),
        ("optim.dense.warmup_steps", -1, "must be at least 0: found -1"),
        ("optim.dense.decay_steps", -1, "must be at least 0: found -1"),
        ("optim.tables.final_fraction", 1.5, "must be at least 0 and at most 1: found 1.5"),
        ("optim.tables.power", 0.0, "must be above 0: found 0.0"),
        ("optim.dense.clip_norm", -1.0, "must be at least 0: found -1.0"),
        ("optim.dense.weight_decay", -1.0, "must be at least 0: found -1.0"),
        (
            "optim.dense.name",
            "adma",
            "must be one of 'sgd', 'momentum', 'adagrad', 'adam', 'adamw': found 'adma'. Did you"
            " mean 'adam'",
        ),
    ],
)
def test_a_value_that_cannot_be_is_rejected_by_the_declaration_of_its_field(field, value, message):
    c = config.default()
    *sections, name = field.split(".")
    functools.reduce(getattr, sections, c)[name] = value
    with pytest.raises(InputError, match=f"^{field}: {message}"):
        config.check(c)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "optim.dense.lr_multipliers",
            {"a": -1},
            "optim.dense.lr_multipliers.a: must be at least 0: found -1",
        ),
        ("embedding.dims", {"a*": 0}, r"embedding.dims.a\*: must be at least 1: found 0"),
        ("embedding.placements", {"a": "x"}, "placements.a: must be one of .*'rows'.*: found 'x'"),
        ("model.parents", {"a": 1}, "model.parents.a: must be text: found 1"),
        (
            "optim.dense.settings",
            {"momentum": 0.9},
            "optim.dense.settings.momentum: must be a field",
        ),
        ("optim.dense.settings", {"eps": -1e-8}, "eps: must be at least 1e-37: found -1e-08"),
        ("optim.dense.settings", {"eps": 0}, "eps: must be at least 1e-37: found 0.* gives NaN"),
        (
            "optim.dense.settings",
            {"b1": 1.0},
            "b1: must be at least 0 and at most 0.99999: found 1",
        ),
        ("optim.dense.settings", {"b2": "x"}, "settings.b2: must be a number: found 'x'"),
        ("optim.tables.settings", {"eps": -5}, "tables.settings.eps: must be at least 0: found -5"),
        ("source", {"kind": "csv", "delimiter": "ab"}, "source.delimiter: must be .*: found 'ab'"),
        ("source", {"kind": "csv", "files": {"a": 3}}, "files.a: must be a path .*: found 3"),
        ("source", {"kind": "csv", "files": {"a": ""}}, "files.a: must be a path .*: found ''"),
        ("source", {"kind": "csv", "files": {"a": ["b", 3]}}, r"files.a\[1\]: must .*: found 3"),
        ("source", {"kind": "csv", "files": {"a": ()}}, "files.a: must have at least one file"),
        ("features", {"categorical": [{"columns": "x"}]}, "features.tasks is missing"),
        ("features", {"tasks": [{"name": "a", "lable": "x"}]}, r"tasks\[0\].lable: .*Did you mean"),
    ],
)
def test_sections_of_other_names_are_checked_with_the_config(field, value, message):
    c = config.default()
    *sections, name = field.split(".")
    section = functools.reduce(getattr, sections, c)
    with section.unlocked():
        section[name] = ConfigDict(value)
    with pytest.raises(InputError, match=message):
        config.check(c)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("data.shards", 3, r"batch_size: must be .* of data.shards: found batch_size=4096, .*=3"),
        (
            "num_epochs",
            2.0,
            "num_steps, num_epochs: one of them must .* num_steps=64, num_epochs=2.0",
        ),
        ("eval.every_steps", 5, "eval.every_steps: must be a positive multiple of .*=5, .*=8"),
        (
            "checkpoint.every_steps",
            4,
            "checkpoint.every_steps: must be a positive multiple of .*=4",
        ),
        ("log_every_steps", 12, "log_every_steps: must be a positive multiple of .*=12, .*=8"),
        ("data.valid", "next_day", "must have data.order = 'days', .* found 'shuffled' and 0"),
        ("optim.tables.decay", "step", "optim.tables.decay_steps: must be at least 1 .*: found 0"),
        (
            "model.dropouts",
            (0.1,),
            r"model.dropouts: must .* one number per layer .*: found \(0.1,",
        ),
        ("optim.dense.clip_scope", "all", "optim.dense.clip_norm: must be above 0 .*: found 0"),
        ("task_losses", {"clik": "bce"}, "task_losses: must be of tasks .*: found 'clik'"),
        ("task_losses", {"click": {"name": "focl"}}, "task_losses.click: must be one of .*'focal'"),
        ("task_losses", {"click": "squared"}, "task_losses.click: must be one of .*'binary'"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_rejected(field, value, message):
    c = runnable()
    c.features.tasks = [dict(name="click", label="clicked")]
    c.features.categorical = [dict(columns=["user"])]
    *sections, name = field.split(".")
    section = functools.reduce(getattr, sections, c)
    with section.unlocked():
        section[name] = ConfigDict(value) if isinstance(value, dict) else value
    with pytest.raises(InputError, match=message):
        config.check(c)


@pytest.mark.parametrize("kind", [None, "csv"])
def test_raw_files_that_are_read_as_they_are_must_be_parquet(kind):
    c = runnable()
    c.data.direct = True
    with c.unlocked():
        c.source = ConfigDict(dict(kind=kind) if kind else {})
    with pytest.raises(InputError, match=f"kind: must be 'parquet'.*: found {kind!r}.*prepare"):
        config.check(c)


@pytest.mark.parametrize("name", [3, ["ranker"], None])
def test_a_name_of_a_model_that_is_no_text_is_rejected(name):
    c = runnable()
    plain = config_files.to_plain(c) | {"model": {"name": name}}
    with pytest.raises(InputError, match=r"model\.name: must be text: found "):
        config_files.from_plain(plain)
    with c.model.unlocked(), c.model.ignore_type():
        c.model.name = name
    with pytest.raises(InputError, match=r"model\.name: must be (one of .*'ranker'|text)"):
        config.check(c)


def test_sections_are_of_the_classes_that_names_choose():
    c = config_files.load(CONFIGS / "criteo.py", ["--config.optim.dense.settings.b1=0.8"])
    sections = config.sections(c)
    assert sections.optim.dense.settings == optim.Adam(b1=0.8)
    assert sections.source.files["train"] == c.source.files.train
    assert sections.features.tasks[0].label == "label"
    assert sections.model.dropout == 0.3
    assert config.sections(runnable()).source is None


class Plain(nn.Module):
    """A model whose fields are declared without rules."""

    tasks: int
    width: int = 32
    activation: str = "gelu"  # a field of the ranker with another default
    widths: tuple[int, ...] = (8,)
    initial: Callable = nn.initializers.zeros

    def __call__(self, inputs, train):
        return inputs


def test_a_module_declares_the_fields_of_the_section_model(monkeypatch):
    monkeypatch.setitem(registry._MODULES, "plain", Plain)
    c = runnable(model="plain")
    of_all = dict(name="plain", parents={}, initial_bias={})
    fields = dict(width=32, activation="gelu", widths=[8])
    assert config_files.to_plain(c.model) == of_all | fields
    by_name = config.default()
    by_name.model.name = "plain"
    assert config_files.to_plain(by_name.model) == of_all | fields
    config.check(c)
    c.model.width = 64
    assert config_files.from_plain(config_files.to_plain(c)).model.width == 64
    assert config.sections(c).model.width == 64
    with c.model.unlocked(), c.model.ignore_type():
        c.model.width = "wide"
    with pytest.raises(InputError, match="model.width: must be a whole number: found 'wide'"):
        config.check(c)


def test_the_name_of_a_model_brings_its_fields_in_files_and_on_the_command_line(tmp_path):
    (tmp_path / "c.py").write_text(
        "from jaxrank.config import default\n\n\ndef get_config():\n    return default()\n"
    )
    overrides = ["--config.model.scales.a=2", "--config.model.name", "factorization_machine"]
    by_line = config_files.load(tmp_path / "c.py", overrides)
    c = config.default()
    c.model.name = "factorization_machine"
    c.model.scales["a"] = 2
    assert config_files.to_plain(by_line.model) == config_files.to_plain(c.model)
    assert "mlp_units" not in c.model
    with pytest.raises((AttributeError, KeyError), match="cross_scal"):
        c.model.cross_scal = 1.0
    c.model.name = "ranker"
    assert c.model.mlp_units == config.default().model.mlp_units


def test_the_fields_of_another_model_are_rejected(monkeypatch):
    monkeypatch.setitem(registry._MODULES, "plain", Plain)
    c = config.default()
    c.model.dropout = 0.3
    c.model.name = "plain"
    with pytest.raises(InputError, match="model.dropout: must be a field"):
        config.check(c)
    c.model.name = "rankr"
    with pytest.raises(InputError, match="model.name: must be one of .*'rankr'.*'ranker'"):
        config.check(c)


def test_a_config_of_a_version_without_names_of_models_is_that_of_the_ranker():
    plain = config_files.to_plain(config.default())
    del plain["model"]["name"]
    assert config_files.from_plain(plain).model.name == "ranker"


def test_the_reference_in_the_docs_is_that_of_the_declarations():
    """After a change: python -m tools.reference"""
    pages = config_reference.pages()
    for name, page in pages.items():
        assert (ROOT / "docs" / name).read_text() == page, name
    text = "".join(pages.values())
    for name in ("ranker", "deepfm", "qnn", "listwise_softmax", "pairwise"):
        assert f'name "{name}"\n' in text


def test_a_field_that_contradicts_a_shipped_config_is_reported():
    """The name of a shipped config is no path of a file, whose lines are searched for the field."""
    with pytest.raises(InputError, match="optim.dense.clip_norm: must be above 0"):
        config_files.load("quickstart", ["--config.optim.dense.clip_scope=all"])
