"""Tests of evaluating the checkpoints of a concurrent run."""

import json
import shutil

import orbax.checkpoint as ocp
import pytest
from runs import run, store_config

from jaxrank import cli
from jaxrank.checkpoints import manager
from jaxrank.checkpoints.manager import Checkpoints
from jaxrank.checkpoints.reader import CheckpointReader
from jaxrank.errors import InputError
from jaxrank.evaluation import evaluate
from jaxrank.evaluation import follow as follows
from jaxrank.evaluation.follow import follow
from jaxrank.export.write import export

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    """The workdir of a finished run with checkpoints at steps 8 and 16."""
    workdir = tmp_path_factory.mktemp("runs") / "whole"
    run(store, workdir)
    return workdir


@pytest.fixture
def unfinished(whole, tmp_path):
    """The same run after its first checkpoint."""
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    shutil.rmtree(workdir / "checkpoints" / "16")
    (workdir / "finished").unlink()
    return workdir


def written(workdir):
    lines = (workdir / "follow" / "valid" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_each_checkpoint_is_scored_once_until_the_run_has_ended(whole, unfinished, monkeypatch):
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        if len(waited) == 2:  # incomplete checkpoints have another name
            shutil.copytree(whole / "checkpoints" / "16", unfinished / "checkpoints" / "16.tmp")
        if len(waited) == 4:
            (unfinished / "checkpoints" / "16.tmp").rename(unfinished / "checkpoints" / "16")
            (unfinished / "finished").touch()

    monkeypatch.setattr(follows.time, "sleep", sleep)
    lines = []
    result = follow(str(unfinished), every_seconds=3, report=lines.append)
    assert waited == [3] * 4
    assert [text.partition(":")[0] for text in lines] == ["step 8", "step 16"]
    for evaluation in result.evaluations:
        expected = evaluate.evaluate(str(whole), checkpoint=str(evaluation["step"]))
        assert evaluation["metrics"] == expected.metrics
    records = written(unfinished)
    assert [r["step"] for r in records] == [8, 16]
    assert records[1]["click/auc"] == result.evaluations[1]["metrics"]["click"]["auc"]

    assert follow(str(unfinished)).evaluations == []
    assert written(unfinished) == records


def test_one_that_was_ended_resumes_behind_what_it_scored(whole, unfinished, monkeypatch):
    def killed(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(follows.time, "sleep", killed)
    with pytest.raises(KeyboardInterrupt):
        follow(str(unfinished))
    shutil.copytree(whole / "checkpoints" / "16", unfinished / "checkpoints" / "16")
    (unfinished / "finished").touch()
    assert [e["step"] for e in follow(str(unfinished)).evaluations] == [16]
    assert [r["step"] for r in written(unfinished)] == [8, 16]


def test_a_checkpoint_that_is_deleted_before_it_is_read_is_left_out(whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "run")
    reading = Checkpoints.restore_weights

    def late(self, step, *args):
        if step == 8:
            shutil.rmtree(self.directory(8))
        return reading(self, step, *args)

    monkeypatch.setattr(Checkpoints, "restore_weights", late)
    lines = []
    result = follow(str(tmp_path / "run"), report=lines.append)
    assert [e["step"] for e in result.evaluations] == [16]
    assert lines[0] == "step 8: checkpoint deleted before it was evaluated"


def test_checkpoints_that_are_deleted_while_orbax_looks_are_no_end(whole, unfinished, monkeypatch):
    looked = ocp.CheckpointManager.reload
    failures = [FileNotFoundError(2, "No such file", "checkpoints/8")] * 2

    def reload(self):
        if failures:
            raise failures.pop()
        return looked(self)

    monkeypatch.setattr(ocp.CheckpointManager, "reload", reload)
    (unfinished / "finished").touch()
    assert [e["step"] for e in follow(str(unfinished)).evaluations] == [8]
    assert not failures


def test_a_command_reads_the_next_checkpoint_where_the_one_it_chose_is_deleted(
    whole, unfinished, tmp_path, monkeypatch
):
    """A concurrent run deletes the newest checkpoint when it saves a newer one."""
    reading = Checkpoints.restore_weights

    def late(self, step, *args):
        if step == 8:
            shutil.copytree(whole / "checkpoints" / "16", unfinished / "checkpoints" / "16")
            shutil.rmtree(self.directory(8))
        return reading(self, step, *args)

    monkeypatch.setattr(Checkpoints, "restore_weights", late)
    result = evaluate.predict(str(unfinished), output=str(tmp_path / "p.parquet"))
    assert result.step == 16

    shutil.copytree(whole / "checkpoints" / "8", unfinished / "checkpoints" / "8")
    shutil.rmtree(unfinished / "checkpoints" / "16")
    with pytest.raises(InputError, match=r"one of the steps \[16\]: found '8'"):
        evaluate.evaluate(str(unfinished), checkpoint="8")


def test_an_export_of_a_checkpoint_that_is_deleted_meanwhile_says_so(
    unfinished, tmp_path, monkeypatch
):
    unlike = CheckpointReader.unlike

    def late(self, tree):
        shutil.rmtree(unfinished / "checkpoints" / "8")
        return unlike(self, tree)

    monkeypatch.setattr(CheckpointReader, "unlike", late)
    with pytest.raises(InputError, match=r"checkpoints/8: must exist until"):
        export(str(unfinished), output=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_other_data_is_followed_in_a_folder_of_its_own(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    alone = follow(str(tmp_path / "run"), split="train")
    other = follow(str(tmp_path / "run"), split="train", data=str(run_store(whole)))
    assert alone.output.endswith("follow/train")
    assert other.output.startswith(f"{alone.output}-")
    assert alone.evaluations == other.evaluations != []


def run_store(workdir):
    return json.loads((workdir / "config.json").read_text())["data"]["store"]


def test_a_damaged_checkpoint_is_named(whole, tmp_path, monkeypatch):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run/checkpoints/8/weights/manifest.ocdbt").unlink()
    monkeypatch.setattr(manager, "_PAUSES", (0.0, 0.01))
    with pytest.raises(InputError, match="checkpoints/8"):
        follow(str(tmp_path / "run"), every_seconds=0.01)


def test_the_command_line_follows(whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    cli.run(["evaluate", f"--workdir={tmp_path / 'run'}", "--follow", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [e["step"] for e in result["evaluations"]] == [8, 16]
    with pytest.raises(InputError, match="--checkpoint: .*without --follow.*found '8'"):
        cli.run(["evaluate", f"--workdir={tmp_path / 'run'}", "--follow", "--checkpoint=8"])
    with pytest.raises(InputError, match="--every: must be used with --follow: found 5"):
        cli.run(["evaluate", f"--workdir={tmp_path / 'run'}", "--every=5"])
    for seconds in ("0", "nan", "inf", "1e10"):
        with pytest.raises(InputError, match="--every: must .* found"):
            cli.run(["evaluate", f"--workdir={tmp_path / 'run'}", "--follow", f"--every={seconds}"])


def test_a_run_is_finished_only_at_its_end(store, whole, unfinished):
    assert (whole / "finished").exists()
    seen = []

    class Stopped(Exception):
        pass

    def report(text):
        seen.append((unfinished / "finished").exists())
        if text.startswith("step 16"):
            raise Stopped

    from jaxrank.train import train

    c = store_config(store)
    (unfinished / "finished").touch()
    with pytest.raises(Stopped):
        train(c, unfinished, report=report)
    assert not seen[-1]
    assert not (unfinished / "finished").exists()
