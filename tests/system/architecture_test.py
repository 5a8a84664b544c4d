"""Who may import whom, read from the source."""

import ast
from pathlib import Path

import pytest
from checkout import ROOT

PACKAGE = ROOT / "jaxrank"
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def importers(module: str) -> set[str]:
    """Files, relative to the package, that import `module` or something in it."""
    return {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(name == module or name.startswith(f"{module}.") for name in imports(path))
    }


def test_the_reader_of_imports_sees_them():
    assert "step.py" in importers("jax")
    assert "cli.py" in importers("jaxrank.train")


def test_data_never_imports_jax():
    beside = ("features", "layout", "errors", "report", "choices")
    allowed = {"jaxrank.data", "jaxrank.__version__", *(f"jaxrank.{name}" for name in beside)}
    for path in FILES:
        inside = PACKAGE / "data" in path.parents
        if not inside and path not in [PACKAGE / f"{name}.py" for name in beside]:
            continue
        names = imports(path)
        assert not {n for n in names if n.split(".")[0] in ("jax", "flax", "optax", "orbax")}, path
        ours = {n for n in names if n.startswith("jaxrank.")}
        outside = {n for n in ours if not any(n == a or n.startswith(f"{a}.") for a in allowed)}
        assert not outside, path


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("flax", {"models/"}),
        ("orbax", {"checkpoints/"}),
        ("tensorboardX", {"telemetry/writers.py"}),
        ("absl.flags", {"config.py"}),
        ("jaxrank.train", {"cli.py"}),
        ("matplotlib", {"plots.py"}),
        ("optax", {"optim.py", "step.py"}),
    ],
)
def test_only_its_own_module_imports(module, allowed):
    found = importers(module)
    stray = {f for f in found if not any(f == a or f.startswith(a) for a in allowed if a)}
    assert not stray


def test_embedding_and_models_do_not_know_each_other():
    for path in FILES:
        names = imports(path)
        if PACKAGE / "embedding" in path.parents:
            assert not {n for n in names if n.startswith(("jaxrank.models", "flax", "optax"))}, path
        if PACKAGE / "models" in path.parents:
            assert not {n for n in names if n.startswith("jaxrank.embedding")}, path
