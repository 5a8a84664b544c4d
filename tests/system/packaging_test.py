"""The wheel and the sdist contain everything that a run needs."""

import ast
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes

import pytest
import quick_compile
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
    env["XLA_FLAGS"] = quick_compile.XLA_FLAGS
    result = json.loads(checked([*command, *job], cwd=tmp_path, env=env))
    assert result["step"] == 3  # of 4,096 examples
    assert result["metrics"]["click/logloss"] < 1


# A folder whose modules are imported inside functions only, and the extra that has what they need.
OPTIONAL = "jaxrank/export/onnx/", "serve"
NOT_FOR_USERS = ("test", "bench")


def imports(node, is_lazy=False):
    """Yields (full name, is_lazy) of the imports in a syntax tree, without those for types."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, is_lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield child.module, is_lazy
        yield from imports(child, is_lazy or isinstance(child, ast.FunctionDef | ast.Lambda))


def normalised(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(folder):
    """Returns {extra or "": normalised names of the distributions that the wheel requires}."""
    checked(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t", "wheel"], cwd=ROOT
    )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(wheel.read(name))
    by_extra = {"": set()}
    for line in metadata.get_all("Requires-Dist"):
        extra = re.search(r"extra == '(.*?)'", line)
        names = by_extra.setdefault(extra[1] if extra else "", set())
        names.add(normalised(re.match(r"[\w.-]+", line)[0]))
    return by_extra


def test_the_wheel_declares_what_its_modules_import(tmp_path):
    by_extra = declared(tmp_path)
    always, (folder, optional) = by_extra.pop(""), OPTIONAL
    extras = set().union(*(names for e, names in by_extra.items() if e not in NOT_FOR_USERS))
    distributions = importlib.metadata.packages_distributions()
    checks = 0
    for path in sorted((ROOT / "jaxrank").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        is_optional = file.startswith(folder)
        for name, is_lazy in imports(ast.parse(path.read_text())):
            package = name.partition(".")[0]
            if package == "jaxrank":
                loads_optional = name.startswith(folder.rstrip("/").replace("/", "."))
                assert is_optional or is_lazy or not loads_optional, (file, name)
            if package in {"jaxrank", *sys.stdlib_module_names}:
                continue
            allowed = always | (by_extra[optional] if is_optional else set())
            allowed |= extras if is_lazy else set()
            names = set(map(normalised, distributions.get(package, [package])))
            assert names & allowed, f"{file} imports {package}, which the wheel does not declare"
            checks += 1
    assert checks > 300
