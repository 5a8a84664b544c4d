"""What may be a workdir."""

from pathlib import Path

import pytest
import tiny_config

from jaxrank import cli, workdir
from jaxrank.errors import InputError
from jaxrank.train import train

CONFIG = f"--config={tiny_config.__file__}"


@pytest.mark.parametrize("url", ["gs://bucket/run", "file:///run", "simplecache::s3://bucket/run"])
@pytest.mark.parametrize(
    "command",
    [("train", CONFIG), ("bench", CONFIG), ("evaluate",), ("predict", "--output=p.parquet")],
    ids=lambda command: command[0],
)
def test_every_verb_refuses_a_workdir_that_is_a_url(tmp_path, monkeypatch, command, url):
    monkeypatch.chdir(tmp_path)
    message = f"--workdir must be a directory of a file system.*found the URL {url}. Mount .* NFS"
    with pytest.raises(InputError, match=message):
        cli.run([*command, f"--workdir={url}"])
    assert list(tmp_path.iterdir()) == []


def test_a_url_that_became_a_path_is_refused_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="found the URL gs:/bucket/run"):
        train(tiny_config.get_config(), Path("gs://bucket/run"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["run", "/tmp/a:b/run", "../a//b", "/mnt/gs:/run", "C:", "1:/2"])
def test_a_path_with_colons_and_slashes_is_a_workdir(name):
    assert workdir.directory(name) == workdir.directory(Path(name)) == Path(name)
