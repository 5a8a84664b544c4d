import argparse
import collections
import json
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import quick_compile
from checkout import HELPERS, ROOT, TINY

import jaxrank
from jaxrank import cli, config_files
from jaxrank.config import default
from jaxrank.config_files import load
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError
from jaxrank.metrics.registry import METRICS

pytestmark = pytest.mark.usefixtures("shared_programs")
VERBS = ("prepare", "train", "evaluate", "predict", "export", "serve", "bench", "report", "compare")


def jaxrank_process(*args, **settings):
    env = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": quick_compile.XLA_FLAGS}
    command = [sys.executable, "-m", "jaxrank", *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, **settings)


def run(capsys, *args):
    """The JSON object and what went to standard error."""
    cli.run([*args, "--json"])
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    return json.loads(line), err


def test_help_of_every_verb_has_an_example(capsys):
    for verb in VERBS:
        with pytest.raises(SystemExit, match="0"):
            cli.run([verb, "--help"])
        assert f"jaxrank {verb} " in capsys.readouterr().out.split("example:")[1]


def test_the_configs_that_come_with_the_program_are_listed_and_found_by_name(capsys):
    result, lines = run(capsys, "configs")
    assert result["configs"].keys() == {path.stem for path in (ROOT / "configs").glob("*.py")}
    assert lines.splitlines() == [
        f"{name:<{max(map(len, result['configs']))}}  {line}"
        for name, line in result["configs"].items()
    ]
    assert all(result["configs"].values())
    assert load("quickstart") == load(ROOT / "configs" / "quickstart.py")
    assert load("mlperf:dlrm") == load(f"{ROOT / 'configs' / 'mlperf.py'}:dlrm")
    with pytest.raises(InputError, match=r"one of criteo, .*'quickstar'.*nearest.*'quickstart'"):
        load("quickstar")


def test_serve_names_what_is_missing(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="nothing: must be a bundle, or a directory of bundles"):
        cli.run(["serve", str(tmp_path / "nothing"), "--port=0"])
    (tmp_path / "run/checkpoints/8").mkdir(parents=True)
    with pytest.raises(InputError, match="run: is a workdir: .*export --workdir=.*/run --output"):
        cli.run(["serve", str(tmp_path / "run"), "--port=0"])
    with pytest.raises(InputError, match="--port: must be at least 0 .*found -1"):
        cli.run(["serve", str(tmp_path), "--port=-1"])
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(InputError, match=r"the extra `serve`: found no uvicorn.*'\.\[serve\]'"):
        cli.run(["serve", str(tmp_path)])


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from jaxrank import cli\n"
        "try: cli.run(['--help'])\nexcept SystemExit: pass\n"
        "print({'jax', 'numpy', 'pyarrow', 'flax', 'orbax'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.stdout.endswith("set()\n")


def test_prepare_imports_matplotlib_only_to_draw(tmp_path):
    code = (
        "import sys; from jaxrank import cli\n"
        "*args, output, picture = sys.argv[1:]\n"
        "for more in ([f'{output}_1'], [f'{output}_2', picture]):\n"
        "    cli.run([*args, *more])\n"
        "    print({'jax', 'matplotlib'} & set(sys.modules))\n"
    )
    args = ["prepare", f"--config={TINY}", "--config.source.rows.train=50"]
    args += ["--config.source.rows.valid=50", f"--output={tmp_path / 'store'}"]
    args += [f"--picture={tmp_path / 'a.png'}"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{HELPERS}"}
    command = [sys.executable, "-c", code, *args]
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    modules = [line for line in result.stdout.splitlines() if line.endswith(("}", "set()"))]
    assert ["matplotlib" in line for line in modules] == [False, True]


@pytest.mark.parametrize(
    "args",
    [
        ("prepare", "--output=store"),
        ("plan", "--topology=v3-8"),
        ("compile", "--topology=v3-8", "--scaling=weak"),
        ("bench", "--workdir=run"),
    ],
)
def test_a_picture_that_cannot_be_written_is_rejected_before_the_work(tmp_path, monkeypatch, args):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine.png").write_text("written by hand")
    for picture, result in (
        ("file/a.png", "it is not a directory"),
        (".", "found a directory"),
        ("mine.png", "must be a new file or one that jaxrank wrote"),
    ):
        with pytest.raises(InputError, match=rf"^--picture: .*{result}"):
            cli.run([*args, f"--config={TINY}", f"--picture={picture}"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine.png"]


def test_ranked_tasks_alone_have_no_picture(tmp_path):
    args, lines = argparse.Namespace(picture=str(tmp_path / "a.png")), []
    cli._draw_reliability(args, {}, lines.append)
    assert "no task has probabilities" in lines[0]
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize("tunables", [None, "glibc.malloc.check=0"])
def test_the_program_restarts_once_with_huge_pages_unless_the_user_chose(tunables):
    code = (
        "import os, sys; from jaxrank.runtime import huge_pages; huge_pages.ensure();"
        "print(os.environ['GLIBC_TUNABLES'], sys.argv[1:])"
    )
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    env |= {"PYTHONPATH": str(ROOT)} | ({} if tunables is None else {"GLIBC_TUNABLES": tunables})
    command = [sys.executable, "-c", code, "a b", "--c"]
    result = subprocess.run(command, capture_output=True, text=True, env=env)
    assert result.stdout == f"{tunables or 'glibc.malloc.hugetlb=1'} ['a b', '--c']\n"


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        cli.run(["--version"])
    assert capsys.readouterr().out == f"jaxrank {jaxrank.__version__}\n"


def test_prepare_train_evaluate_and_predict_follow_each_other(capsys, tmp_path):
    store, workdir = str(tmp_path / "store"), str(tmp_path / "run")
    prepared, err = run(capsys, "prepare", f"--config={TINY}", f"--output={store}")
    assert prepared["splits"]["train"]["rows"] == 6000
    assert "rows/s" in err

    args = ("train", f"--config={TINY}", f"--workdir={workdir}", f"--config.data.store={store}")
    trained, err = run(capsys, *args, "--config.model.mlp_units=(8,)", "--config.num_steps=8")
    assert trained["step"] == 8
    assert trained["examples_per_second"] > 0
    assert trained["seconds"] == pytest.approx(sum(trained["phase_seconds"].values()))
    assert min(trained["phase_seconds"].values()) > 0
    described = err.partition("\nmodel ")[2].partition("\nsteps ")
    assert "examples   6,000\n" in f"{described[0]}\n"
    assert "\nbest       lowest click/logloss\n" in err
    assert described[2].split("\n")[0].split() == ["8", "of", "128", "examples"]
    assert trained["checkpoint"].endswith("checkpoints/8")
    names = {metric.name for metric in METRICS["binary"]} | {"calibration", "examples"}
    for part in ("metrics", "best_possible", "constant"):
        assert set(trained[part]) == {f"{t}/{n}" for t in ("click", "conversion") for n in names}
    assert "best possible" in err
    assert "tensorboard --logdir" in err

    evaluated, _ = run(capsys, "evaluate", f"--workdir={workdir}", "--checkpoint=best")
    for part in ("step", "best_possible", "constant", "checkpoint"):
        assert evaluated[part] == trained[part]
    assert evaluated["metrics"] == pytest.approx(trained["metrics"], abs=1e-6)

    output = tmp_path / "p.parquet"
    predicted, _ = run(capsys, "predict", f"--workdir={workdir}", f"--output={output}")
    assert predicted["rows"] == 1000
    assert output.is_file()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "a verb must be given"),
        (("trian",), "invalid choice: 'trian'"),
        (("train", "--workdir=w"), "--config"),
        (("train", "--config=none.py", "--workdir=w"), "--config: no such file: none.py"),
        (
            ("train", f"--config={TINY}", "--work-dir=w"),
            r"^unknown argument '--work-dir=w'. Did you mean --workdir\?",
        ),
        (
            ("train", f"--config={TINY}", "--workdir=w", "--num_epochs=2"),
            r"argument '--num_epochs=2'. Did you mean --config.num_epochs=2\?",
        ),
        (
            ("train", f"--config={TINY}", "--workdir=w", "--optim.dense.decay=cosine"),
            r"Did you mean --config.optim.dense.decay=cosine\?",
        ),
        (
            ("train", f"--config={TINY}", "--workdir=w", "--quite"),
            r"unknown argument '--quite'. Did you mean --quiet\?",
        ),
        (
            ("train", f"--config={TINY}", "--workdir=w", "--config.optm.dense.name=sgd"),
            "optm: must be a field of the config: found no such field. Did you mean optim",
        ),
        (
            ("train", f"--config={TINY}", "--workdir=w", "--config.features.categorical[5].rows=3"),
            r"--config.features.categorical\[5\].rows=3: must be a field or element",
        ),
        (
            ("train", f"--config={TINY}", "--workdir=w", "--config.seed=-1"),
            "seed: must be at least 0 and at most 2147483647: found -1",
        ),
        (
            ("train", f"--config={TINY}", "--workdir=w", "--config.batch_size=many"),
            "config.batch_size.*many",
        ),
        (
            ("train", f"--config={TINY}", "--workdir=w", "--config.eval.metric=3", "extra"),
            "unknown argument 'extra'",
        ),
        (("evaluate", "--workdir=w", "--batch-size=x"), "--batch-size: invalid int value: 'x'"),
        (("predict", "--workdir=w", "--output=p.parquet", "--batch-size=0"), "at least 1: found 0"),
        (("--json", "evaluate", "--workdir=w"), "--json: flags must follow the verb"),
        (("--workdir=w", "evaluate"), "--workdir=w: flags must follow the verb"),
        (("evaluate", "--workdir=w", "--by="), "--by: must have a value: found nothing"),
        (("evaluate", "--workdir=w", "--by", ""), "--by: must have a value: found nothing"),
        (
            ("train", "--config=a.py", "--workdir=w", "--config=b.py"),
            "--config: must be given once: found it again, '--config=b.py'",
        ),
        (("evaluate", "--by=a", "--workdir=w", "--by=b"), "--by: must be given once: .*--by=b"),
    ],
)
def test_bad_usage_is_rejected_with_what_was_found(tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        cli.run(args)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("verb", "module", "function", "result"),
    [
        ("evaluate", "evaluation.follow", "follow", {"evaluations": [], "output": "RESULT"}),
        ("predict", "evaluation.evaluate", "predict", {"rows": 3, "output": "RESULT"}),
        ("export", "export.bundle", "export_bundle", {"rows": 3, "bytes": 8, "output": "RESULT"}),
    ],
)
def test_quiet_leaves_the_result(monkeypatch, capsys, verb, module, function, result):
    fields = {"tables": 1, "checkpoint": "step 8", "worse_than_constant": [], "ranked": []} | result

    def work(*_, report=lambda text: None, **__):
        report("RESULT" if verb == "evaluate" else "progress")  # it reports each checkpoint
        return collections.namedtuple("Done", fields)(**fields)

    monkeypatch.setattr(f"jaxrank.{module}.{function}", work)
    monkeypatch.setattr("jaxrank.workdir.user_code.changes", lambda _: ["progress"])
    # The stand-in has few keys of a result, so its record is not checked.
    monkeypatch.setitem(cli._RUN, verb, cli._RUN[verb].__wrapped__)
    argv = [verb, "--workdir=w", "--follow" if verb == "evaluate" else "--output=o"]
    lines = {}
    for quiet in ([], ["--quiet"]):
        cli.run([*argv, *quiet])
        lines[bool(quiet)] = capsys.readouterr().out.splitlines()
    assert len(lines[False]) > len(lines[True]) == 1
    assert "RESULT" in lines[True][0]
    cli.run([*argv, "--quiet", "--json"])
    output, errors = capsys.readouterr()
    assert errors == ""
    assert json.loads(output)["output"] == "RESULT"


def test_an_override_adds_a_field_where_a_section_takes_any_name():
    overrides = [
        "--config.optim.dense.settings.b2=0.97",
        "--config.optim.dense.lr_multipliers.cross/*=0.5",
        "--config.optim.tables.settings.eps",
        "1e-6",
        "--config.embedding.dims.c*=8",
        "--config.embedding.placements.c1=rows",
    ]
    config = load(TINY, overrides)
    assert dict(config.optim.dense.settings) == {"b2": 0.97}
    assert dict(config.optim.dense.lr_multipliers) == {"cross/*": 0.5}
    assert dict(config.optim.tables.settings) == {"eps": 1e-6}
    assert dict(config.embedding.dims) == {"c*": 8}
    assert dict(config.embedding.placements) == {"c1": "rows"}


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("optim.dense.setings.b2=0.9", "optim.dense.setings"),
        ("optim.dense.b2=0.9", "optim.dense.b2"),
        ("embedding.dims.a.b=8", "embedding.dims.a"),
        ("source.rowz=8", "source.rowz"),
        ("source.delimiter=;", "source.delimiter"),
    ],
)
def test_no_other_section_gets_a_field_by_an_override(override, field):
    with pytest.raises(InputError, match=f"{field}: must be a field"):
        load(TINY, [f"--config.{override}"])


@pytest.mark.parametrize("value", ["{[]:1}", "{1}", "b'x'", "(" * 3000, "[1", ""])
def test_what_is_no_number_is_taken_as_text(value):
    config = default()
    assert config_files._set_by_name(config, "embedding.dims.c*", value)
    assert dict(config.embedding.dims) == {"c*": value}


@pytest.mark.parametrize("value", ["1e400", "-1" + "0" * 400])
def test_a_number_beyond_floating_point_is_rejected(value):
    with pytest.raises(InputError, match=r"optim.dense.lr_multipliers.a: must be a finite number"):
        load(TINY, [f"--config.optim.dense.lr_multipliers.a={value}"])


def test_an_override_of_a_list_element_and_of_an_unset_field_is_taken():
    overrides = ["--config.features.categorical[0].rows=77", "--config.num_epochs", "1.5"]
    config = load(TINY, overrides)
    assert config.features.categorical[0]["rows"] == 77
    assert config.num_epochs == 1.5


def test_an_override_sets_what_an_entry_of_the_data_does_not_name_yet(tmp_path):
    path = tmp_path / "config.py"
    path.write_text(
        "import tiny\nfrom ml_collections import ConfigDict\n"
        "def get_config():\n"
        "    c = tiny.config()\n"
        "    c.source = ConfigDict(dict(kind='csv', files=dict(train='a.csv', test=('b', 'c'))))\n"
        "    return c\n"
    )
    inputs = [
        "features.categorical[0].length=3",
        'features.keep=["c0", "c2"]',
        "features.ragged[0].combiner=mean",
        "source.files.valid=b.csv",
        "source.files.train=20240501",
        "source.files.test=('d', 'e')",
        "source.delimiter=;",
        "source.null_values=('NA', '-')",
    ]
    config = load(str(path), [f"--config.{override}" for override in inputs])
    assert config.features.categorical[0]["length"] == 3
    assert config.features.keep == ["c0", "c2"]
    assert config.features.ragged[0]["combiner"] == "mean"
    files = dict(valid="b.csv", train="20240501", test=("d", "e"))
    assert config.source.files.to_dict() == files
    assert (config.source.delimiter, config.source.null_values) == (";", ("NA", "-"))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("batch_size=many", r"--config.batch_size=many: .*'many'"),
        (
            "features.categorical[0].rows=many",
            r"--config.features.categorical\[0\].rows=many: .*'many'",
        ),
        (
            "features.categorical[0][1]=2",
            r"--config.features.categorical\[0\]\[1\]=2: must be a field or element",
        ),
        (
            "features.categorical.c0=1",
            r"--config.features.categorical.c0=1: entries of a list have numbers: give one",
        ),
        ("features.keep[7]=c0", r"--config.features.keep\[7\]=c0: must be a field or element"),
    ],
)
def test_the_override_that_cannot_be_is_named(override, message):
    others = ["--config.seed=3", "--config.num_epochs=1.0"]
    with pytest.raises(InputError, match=f"^{message}"):
        load(TINY, [others[0], f"--config.{override}", others[1]])


def test_an_override_of_no_field_of_an_entry_is_rejected(tmp_path):
    args = (f"--config={TINY}", f"--output={tmp_path / 'store'}")
    message = r"categorical\[0\].min_cont: must be a field .*Did you mean .*\[0\].min_count\?"
    with pytest.raises(InputError, match=f"features.{message}"):
        cli.run(["prepare", *args, "--config.features.categorical[0].min_cont=3"])
    assert not list(tmp_path.iterdir())


def test_prepare_rejects_an_unknown_loss_before_it_reads(tmp_path):
    args = (f"--config={TINY}", f"--output={tmp_path / 'store'}")
    with pytest.raises(InputError, match=r"^task_losses.click: must be .* found 'focused'"):
        cli.run(["prepare", *args, "--config.task_losses.click=focused"])
    assert not list(tmp_path.iterdir())


def test_the_help_of_a_verb_shows_the_fields_of_a_config(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.run(["train", "--help-config"])
    assert not ended.value.code
    shown = capsys.readouterr().out
    assert "--config.batch_size=0  (examples; at least 0)\n      examples per step" in shown
    assert "--config.model.cross='dcn_v2'" in shown
    assert "--config.optim.dense.settings.b1=0.9" in shown


def test_a_terminal_that_has_gone_stops_nothing():
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as terminal:
        cli._print("to somebody", terminal)
        os.close(master)
        cli._print("to nobody", terminal)


def test_bad_input_ends_with_status_2_and_one_line():
    result = jaxrank_process("evaluate", "--workdir=/nowhere/run")
    assert result.returncode == 2
    assert result.stdout == ""
    assert re.fullmatch(
        r"jaxrank: error: /nowhere/run/config.json: no such file.*\n", result.stderr
    )


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("evaluate", "--workdir=/nowhere/run"), "/nowhere/run/config.json: no such file"),
        (("evaluate",), "the following arguments are required: --workdir"),
        (("evaluate", "--workdri=x", "--workdir=y"), "unknown argument '--workdri=x'"),
    ],
)
def test_an_error_is_an_object_where_json_is_asked_for(args, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["jaxrank", *args, "--json"])
    monkeypatch.setattr(cli.processes, "leave", lambda *_, **__: None)
    monkeypatch.setattr(cli.huge_pages, "ensure", lambda: None)
    monkeypatch.setattr(cli.threads, "ensure_several", lambda: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    (line,) = capsys.readouterr().out.splitlines()
    assert ended.value.code == 2
    result = json.loads(line)
    assert result["status"] == 2
    assert error in result["error"]


LIMITED = """
import resource, signal, sys, threading, time
# As some of Orbax's, where a checkpoint could not be begun.
threading.Thread(target=time.sleep, args=(600,)).start()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)
from jaxrank.cli import main
main()
"""


def limited_process(limit, *args):
    """Runs jaxrank where no file may grow beyond `limit` bytes, which is how a full disk looks."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{HELPERS}", "XLA_FLAGS": quick_compile.XLA_FLAGS}
    env.pop("JAX_COMPILATION_CACHE_DIR", None)  # JAX would report that it is full
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # Python would cut bytecode at the limit and keep it
    command = [sys.executable, "-c", LIMITED, str(limit), *args]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)


def test_a_full_disk_stops_training_and_keeps_the_checkpoints_before(tmp_path):
    store, workdir = tmp_path / "store", tmp_path / "run"
    cli.run(["prepare", f"--config={TINY}", f"--output={store}"])
    args = ("train", f"--config={TINY}", f"--workdir={workdir}", f"--config.data.store={store}")
    cli.run([*args, "--config.num_steps=8"])
    result = limited_process(20_000, *args, "--config.num_steps=32", "--allow-config-change")
    assert result.returncode == 1
    lines = result.stderr
    assert lines.startswith(f"jaxrank: error: {workdir}/checkpoints: a checkpoint could not be")
    assert "File too large" in lines
    assert lines.count("\n") == 1
    cli.run(["evaluate", f"--workdir={workdir}", "--checkpoint=8"])
    steps = [p.name for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()]
    assert steps == ["8"]


def test_what_is_done_continues_where_nobody_reads_what_is_reported(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = ["jaxrank", "prepare", f"--config={TINY}", f"--output={tmp_path / 'store'}"]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{HELPERS}"}
    done = subprocess.run(
        [sys.executable, "-m", *command], stdout=writer, stderr=subprocess.PIPE, env=env
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    assert open_store(tmp_path / "store").split("train").rows


def test_a_full_disk_leaves_no_predictions(tmp_path):
    workdir, output = tmp_path / "run", tmp_path / "p.parquet"
    cli.run(["train", f"--config={TINY}", f"--workdir={workdir}", "--config.num_steps=8"])
    args = ("predict", f"--workdir={workdir}", f"--output={output}")
    result = limited_process(5_000, *args)
    assert result.returncode == 1
    assert result.stderr.startswith(f"jaxrank: error: {output}: cannot be written")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "take", [lambda _: np.empty(1 << 48, np.uint8), lambda _: jnp.zeros(1 << 46)]
)
def test_too_little_memory_is_reported_in_one_line(take, monkeypatch, capsys):
    monkeypatch.setattr(cli, "run", take)
    monkeypatch.setattr(sys, "argv", ["jaxrank", "plan"])
    monkeypatch.setattr(cli.processes, "leave", lambda *_, **__: None)  # it is the tests' process
    with pytest.raises(SystemExit) as result:
        cli.main()
    lines = capsys.readouterr().err
    assert result.value.code == 1
    assert re.fullmatch(r"jaxrank: error: not enough memory: .*\d+.* batch_size.*\n", lines)
