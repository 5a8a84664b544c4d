"""A delta makes of its base the bundle that a whole export writes, bit for bit."""

import errno
import fcntl
import json
import os
import shutil
import sys

import jaxrank_serving
import numpy as np
import pytest
from every_feature import config, write
from jaxrank_serving import BundleError, apply_delta
from jaxrank_serving.bundle import checksum, seal
from jaxrank_serving.delta import __main__ as delta_command
from jaxrank_serving.delta import parts
from runs import nothing, saved

from jaxrank.errors import InputError, RunError
from jaxrank.export import bundle as bundles
from jaxrank.export.bundle import export_bundle
from jaxrank.export.comparison import parity

ENTRY = ("bytes", "checksum")  # of a file in a manifest
VARIES = ("model.stablehlo", "model_card.md", "manifest.json")  # between two exports of one run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Bundles of two runs. In the second one, a vocabulary is shorter and another one longer."""
    folder = tmp_path_factory.mktemp("delta")
    write(folder / "raw")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "_REPEATS", dict.fromkeys(parity.CANDIDATES, 1))
        patch.setattr(parts, "_PIECE", 200)
        patch.setattr(parts, "_VALUES", 60)
        for name, least in (("old", 2), ("new", 4)):
            c = config(folder / "raw")
            c.mesh.devices = 1
            c.features.categorical[0]["min_count"] = 5 - least
            c.features.categorical[1]["min_count"] = c.features.ragged[0]["min_count"] = least
            saved(c, folder / name)
            export(folder, name, name + "_bundle")
        export(folder, "new", "delta", since=str(folder / "old_bundle"))
        apply_delta(folder / "old_bundle", folder / "delta", folder / "applied")
    return folder


def export(folder, run, output, **fields):
    path = str(folder / output)
    return export_bundle(str(folder / run), output=path, report=nothing, **fields)


def read_files(folder):
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def test_a_delta_gives_the_files_of_a_whole_export(folder):
    whole, applied = read_files(folder / "new_bundle"), read_files(folder / "applied")
    assert whole.keys() == applied.keys()
    for name in whole.keys() - set(VARIES):
        assert whole[name] == applied[name], name
    old = read_files(folder / "old_bundle")
    assert old["vocabularies.bin"] != whole["vocabularies.bin"]
    assert len(old["tables/dim4.bin"]) != len(whole["tables/dim4.bin"])
    assert applied["manifest.json"] == read_files(folder / "delta")["target.json"]
    scorer = jaxrank_serving.load(folder / "applied", verify=True)
    expected = jaxrank_serving.load(folder / "new_bundle")
    candidates = [{c.name: None for c in scorer.signature.columns} | {"user": "u1"}]
    actual, expected = (s.score({}, candidates)["click"] for s in (scorer, expected))
    np.testing.assert_array_equal(actual, expected)


def test_a_delta_has_only_what_has_changed(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "_REPEATS", dict.fromkeys(parity.CANDIDATES, 1))
    shutil.copytree(folder / "new_bundle", tmp_path / "base")
    stack = json.loads((tmp_path / "base" / "signature.json").read_text())["stacks"][0]
    edit_row(tmp_path / "base", stack, 7)
    reseal(tmp_path / "base")
    since = str(tmp_path / "base")
    with monkeypatch.context() as patch:  # the disk is full
        patch.setattr(bundles, "write_delta", fails)
        with pytest.raises(RunError, match="delta: cannot be written: .*No space left"):
            export(folder, "new", tmp_path / "delta", since=since)
    monkeypatch.setattr(bundles, "write_stack", None)  # the whole bundle is there
    result = export(folder, "new", tmp_path / "delta", since=since)
    assert (result.delta.rows, result.delta.added, result.delta.removed) == (1, 0, 0)
    names = set(read_files(tmp_path / "delta")) - set(VARIES) - {"target.json"}
    assert names == {stack["file"] + ".rows", stack["file"] + ".changed"}
    assert (tmp_path / "delta" / (stack["file"] + ".changed")).stat().st_size == 4 * stack["dim"]
    apply_delta(since, tmp_path / "delta", tmp_path / "applied")
    for name, content in read_files(tmp_path / "applied").items():
        assert name in VARIES or content == read_files(folder / "new_bundle")[name], name


def fails(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def edit_row(bundle, stack, row):
    with open(bundle / stack["file"], "r+b") as file:
        file.seek(4 * stack["dim"] * row)
        file.write(b"\x01\x02\x03\x04")


def reseal(bundle):
    """Writes the manifest of a bundle that was edited."""
    tree = json.loads((bundle / "manifest.json").read_text())
    for name, entry in tree["files"].items():
        entry["checksum"] = checksum(bundle / name)
    tree["checksum"] = seal(tree)
    (bundle / "manifest.json").write_text(json.dumps(tree))


def damaged_base(folder, base, delta):
    stack = jaxrank_serving.load(base).signature.stacks[0]
    with open(base / stack.file, "r+b") as file:
        file.seek(4 * stack.dim)
        file.write(b"\x01\x02\x03")


def damaged_delta(folder, base, delta):
    with open(delta / "vocabularies.bin.added", "r+b") as file:
        file.write(b"\x01\x02\x03")


def truncated_delta(folder, base, delta):
    with open(delta / "vocabularies.bin.added", "r+b") as file:
        file.truncate(6)


def other_base(folder, base, delta):
    shutil.rmtree(base)
    shutil.copytree(folder / "new_bundle", base)


def whole_bundle(folder, base, delta):
    shutil.rmtree(delta)
    shutil.copytree(folder / "new_bundle", delta)


def rewritten(name, edit):
    """Replaces a file of a delta, with a right checksum."""

    def damage(folder, base, delta):
        path = delta / name
        path.write_bytes(edit(path.read_bytes()))
        tree = json.loads((delta / "manifest.json").read_text())
        tree["files"][name]["bytes"] = path.stat().st_size
        (delta / "manifest.json").write_text(json.dumps(tree))
        reseal(delta)

    return damage


def edited_target(edit):
    """Changes the manifest of the result, with a right checksum."""

    def change(content):
        tree = json.loads(content)
        edit(tree)
        return json.dumps(tree | {"checksum": seal(tree)}).encode()

    return rewritten("target.json", change)


def occupied(folder, base, delta):
    (base.parent / "out").mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (other_base, r"base: must be the bundle \w+, which .*delta changes: found the bundle \w+"),
        (damaged_base, r"tables/\w+.bin must have the checksum .*Verify .*base"),
        (damaged_delta, "delta/vocabularies.bin.added: is corrupt"),
        (truncated_delta, "vocabularies.bin.added: must have [0-9,]+ bytes: found 6"),
        (whole_bundle, "delta: must be a delta: found a whole bundle"),
        (occupied, "out: must not exist"),
        (rewritten("target.json", lambda content: b"{"), "target.json: must be a manifest"),
        (edited_target(lambda tree: tree.pop("files")), "target.json: files must be an object"),
        (
            edited_target(lambda tree: tree.pop("format_version")),
            "target.json: must have a format_version of 1 to 3.*found None",
        ),
        (
            edited_target(lambda tree: tree["files"]["model_card.md"].pop("bytes")),
            "target.json: model_card.md must have bytes and a checksum",
        ),
        (
            edited_target(
                lambda tree: tree["files"].update({"../outside/x": dict.fromkeys(ENTRY)})
            ),
            "target.json: a file must be within the bundle: found '../outside/x'",
        ),
        (
            rewritten("tables/dim4.bin.rows", lambda content: content[8:] + content[:8]),
            "dim4.bin.rows: must have rising numbers of rows",
        ),
        (
            rewritten("tables/dim4.bin.rows", lambda content: content[:-3]),
            "dim4.bin.rows: must have rows of 8 bytes",
        ),
    ],
)
def test_a_delta_is_applied_to_its_base_only(folder, tmp_path, damage, message):
    base, delta = tmp_path / "base", tmp_path / "delta"
    shutil.copytree(folder / "old_bundle", base)
    shutil.copytree(folder / "delta", delta)
    damage(folder, base, delta)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(BundleError, match=message):
        apply_delta(base, delta, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert not list(tmp_path.glob("out/*"))


def test_the_command_applies_a_delta_and_reports_an_error_in_one_line(
    folder, tmp_path, capsys, monkeypatch
):
    output = str(tmp_path / "out")
    for base, status in (("old_bundle", 0), ("new_bundle", 2)):
        argv = ["delta", str(folder / base), str(folder / "delta"), output]
        monkeypatch.setattr(sys, "argv", argv)
        assert delta_command.main() == status
    out, err = capsys.readouterr()
    assert out.strip() == jaxrank_serving.load(output).bundle.version
    assert err.count("\n") == 1
    assert err.startswith("error: ")


def test_files_of_a_process_that_was_killed_are_removed(folder, tmp_path):
    for name in (".out.1.delta", ".out.2.delta", ".out.x.partial"):
        (tmp_path / name / "tables").mkdir(parents=True)
    descriptor = os.open(tmp_path / ".out.2.delta", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # a process that is running
        apply_delta(folder / "old_bundle", folder / "delta", tmp_path / "out")
    finally:
        os.close(descriptor)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".out.2.delta", ".out.x.partial", "out"]


def test_a_delta_is_not_a_bundle(folder, tmp_path):
    with pytest.raises(
        BundleError, match="must be a whole bundle: found a delta of '.*apply_delta"
    ):
        jaxrank_serving.load(folder / "delta")
    for path, tables, message in (
        (folder / "delta", "float32", "--since: .*must be a whole bundle"),
        (folder / "old_bundle", "int8", "must be stored as --tables=int8: found float32"),
    ):
        with pytest.raises(InputError, match=message):
            export(folder, "new", tmp_path / "out", since=str(path), tables=tables)
    assert not list(tmp_path.iterdir())
