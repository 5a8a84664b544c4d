"""Earlier names: of fields in a config, and in the files of stores and workdirs."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
import tiny
import tiny_config

from jaxrank import config_files, renames, validate
from jaxrank.data.store import manifest
from jaxrank.data.store.block import from_arrow, to_arrow
from jaxrank.data.store.reader import open_store
from jaxrank.errors import InputError
from jaxrank.features import Schema
from jaxrank.json_files import plain
from jaxrank.layout import ReplicatedRows
from jaxrank.workdir import files as workdirs

# config.json, schema.json and parts of manifest.json, of a run of the version before the renames.
WRITTEN = json.loads((Path(__file__).parent / "golden/old_names/run.json").read_text())
RENAMED = [(s, old, new) for s, names in renames.FIELDS.items() for old, new in names.items()]


@pytest.mark.parametrize(("section", "old", "new"), RENAMED)
def test_an_earlier_field_is_rejected_with_its_new_name(section, old, new):
    lead = f"{section}." if section else ""
    with pytest.raises(InputError, match=rf"{lead}{old} is now {lead}{new}\."):
        config_files.load(tiny_config.__file__, [f"--config.{lead}{old}=3"])


def test_an_earlier_field_of_an_entry_is_rejected_with_its_new_name():
    with pytest.raises(InputError, match=r"features\.ids is now features\.categorical\."):
        config_files.load(tiny_config.__file__, ["--config.features.ids[0].rows=3"])


@pytest.mark.parametrize(("old", "new"), renames.VALUES["model.cross"].items())
def test_an_earlier_value_is_rejected_with_its_new_name(old, new):
    with pytest.raises(InputError, match=f"model.cross: must be one of .*'{old}' is now '{new}'"):
        config_files.load(tiny_config.__file__, [f"--config.model.cross={old}"])


def test_an_earlier_field_in_a_config_file_is_rejected_with_its_new_name(tmp_path):
    path = tmp_path / "earlier.py"
    path.write_text(
        "from jaxrank.config import default\n\n\n"
        "def get_config():\n    c = default()\n    c.optim.dense.base_rate = 1.0\n    return c\n"
    )
    with pytest.raises(
        InputError, match=r"earlier\.py:6: .*base_rate is now .*base_learning_rate\."
    ):
        config_files.load(path)


def unknown(old, new, where=""):
    """The keys of nested dicts, and of lists of them, that `new` has not where `old` has them."""
    if isinstance(old, list) and isinstance(new, list) and new:
        return [key for entry in old[:1] for key in unknown(entry, new[0], f"{where}[]")]
    if not isinstance(old, dict):
        return []
    if not isinstance(new, dict):
        return [where]
    lost = [f"{where}.{key}" for key in old if key not in new]
    return lost + [
        x for k in old.keys() & new.keys() for x in unknown(old[k], new[k], f"{where}.{k}")
    ]


def test_files_of_the_version_before_have_the_names_of_this_one(store):
    new = json.loads(json.dumps(config_files.to_plain(tiny.config())))
    assert len(unknown(WRITTEN["config"], new)) > 10
    result = renames.config(WRITTEN["config"])
    assert unknown(result, new) == [".optim.tables.lr_multipliers.*"]  # a pattern
    assert list(result) == [renames.now("", key) or key for key in WRITTEN["config"]]
    assert result["model"]["cross"] == "dcn"
    config_files.sections(config_files.from_plain(result))

    schema = validate.parse(Schema, renames.features(WRITTEN["schema"]), "")
    assert [f.name for f in schema.categorical] == ["c0", "c1"]

    read = manifest.read(open_store(store).path / "manifest.json")
    assert len(unknown(WRITTEN["manifest"], read)) > 10
    assert unknown(renames.manifest(WRITTEN["manifest"]), read) == []


def earlier(value, names):
    """A tree with earlier names for its keys, wherever they are."""
    if isinstance(value, dict):
        return {names.get(key, key): earlier(inside, names) for key, inside in value.items()}
    return value


def inverse(names):
    return {new: old for old, new in names.items()}


def test_a_store_under_earlier_names_is_the_same_store(store, tmp_path):
    now = open_store(store)
    tree = manifest.read(now.path / "manifest.json") | {"format_version": 3}
    names = inverse(renames.FIELDS["features"]) | {"pending": "too_young"}
    path = tmp_path / "store"
    path.mkdir()
    (path / "manifest.json").write_text(manifest.SEAL.to_text(earlier(tree, names)))
    assert '"floats"' in (path / "manifest.json").read_text()
    old = open_store(path)
    assert (old.schema, old.spec) == (now.schema, now.spec)
    for name, split in now.splits.items():
        assert old.splits[name].statistics == split.statistics
        assert old.splits[name].fingerprint == split.fingerprint

    block = now.split("train").read_block(0)
    columns = to_arrow(block)
    names = inverse(renames.COLUMNS)
    columns = columns.rename_columns([names.get(n, n) for n in columns.schema.names])
    assert "floats" in columns.schema.names
    assert isinstance(columns, pa.RecordBatch)
    result = from_arrow(columns)
    assert (result.dense == block.dense).all()
    assert (result.ids == block.ids).all()


def test_a_workdir_under_earlier_names_is_the_same_workdir(store, tmp_path):
    config = tiny.config()
    config.model.cross = "dcn_mix"
    hot = {"dim8": ReplicatedRows(("c1",), ("c0", "c0", "l0"), 2)}
    workdirs.save(tmp_path, config, open_store(store).schema, hot)
    names = {"replicated_tables": "whole", "hot_rows": "merged"}
    for fields in renames.FIELDS.values():
        names |= inverse(fields)
    del names["dense"]  # also a section of `optim`
    for file in ("config", "schema", "placement"):
        path = tmp_path / f"{file}.json"
        tree = earlier(json.loads(path.read_text()), names)
        if file == "config":
            tree["model"]["cross"] = "mix"
            tree["source"]["floats"] = tree["source"].pop("dense")
            tree["features"]["floats"] = tree["features"].pop("dense")
            del tree["model"]["floats_hidden"]  # as if it had come later
        elif file == "schema":
            tree["floats"] = tree.pop("dense")
        path.write_text(json.dumps(tree))
    assert config_files.to_plain(workdirs.load_config(tmp_path)) == config_files.to_plain(config)
    assert plain(workdirs.load_schema(tmp_path)) == plain(open_store(store).schema)
    assert workdirs.load_placement(tmp_path) == hot
    workdirs.check_config(tmp_path, config)
    config.model.mlp_units = (3,)
    with pytest.raises(InputError, match=r"model.mlp_units: \[16\], now \[3\]"):
        workdirs.check_config(tmp_path, config)
