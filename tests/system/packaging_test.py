"""What is built of the project holds all that a run needs."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv

import pytest
from checkout import ROOT

pytest.importorskip("hatchling", reason="needs the extra test")


def checked(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_installed_package_runs_the_main_job_without_the_checkout(tmp_path):
    """Builds the wheel from the source distribution, and installs it in a new environment.

    Only the dependencies are borrowed, because installing them takes minutes.
    """
    built = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path), "-t"]
    checked([*built, "sdist"], cwd=ROOT)
    (source,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (unpacked,) = (tmp_path / "source").iterdir()
    checked([*built, "wheel"], cwd=unpacked)
    (wheel,) = tmp_path.glob("*.whl")

    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    new = tmp_path / "environment"
    venv.create(new, symlinks=True)
    pip = [sys.executable, "-m", "pip", f"--python={new}/bin/python"]
    checked([*pip, "install", "--no-deps", "--no-index", wheel], cwd=tmp_path, env=env)
    (packages,) = new.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"])

    command = [new / "bin" / "jaxrank"]
    where = json.loads(checked([*command, "launch", "--path", "--json"], cwd=tmp_path, env=env))
    assert where["path"].startswith(str(packages))
    assert os.path.isfile(f"{where['path']}/local.sh")
    assert "Two tasks on generated clicks" in checked([*command, "configs"], cwd=tmp_path, env=env)
    changes = ["--config.source.rows.train=9000", "--config.source.rows.valid=1000"]
    changes += ["--config.num_epochs=1"]
    job = ["train", "--config=quickstart", f"--workdir={tmp_path / 'run'}", *changes, "--json"]
    result = json.loads(checked([*command, *job], cwd=tmp_path, env=env))
    assert result["step"] == 3  # of 4,096 examples
    assert result["metrics"]["click/logloss"] < 1
