"""The scorer is a package of its own: it needs NumPy, ONNX Runtime and xxhash, and no JAX."""

import ast
import re
import subprocess
import sys
import tomllib

from checkout import ROOT

PACKAGE = ROOT / "serving" / "jaxrank_serving"
FILES = sorted([*PACKAGE.glob("*.py"), *PACKAGE.glob("derived/*.py")])
PROJECT = tomllib.loads((ROOT / "serving" / "pyproject.toml").read_text())["project"]
DECLARED = {re.match(r"[\w.-]+", line)[0] for line in PROJECT["dependencies"]}


def test_it_declares_these_dependencies_only():
    assert {"numpy", "onnxruntime", "xxhash"} == DECLARED


def test_it_imports_no_other_packages():
    assert len(FILES) > 8
    for path in FILES:
        names = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module.partition(".")[0])
        assert names - set(sys.stdlib_module_names) <= DECLARED | {"jaxrank_serving"}, path


def test_no_module_of_it_loads_jax_or_evaluates_code():
    code = "import sys, jaxrank_serving; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    path = [str(ROOT / "serving"), *(p for p in sys.path if p and p != str(ROOT))]
    env = {"PYTHONPATH": ":".join(path)}
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    assert not {"jax", "jaxrank", "pyarrow", "onnx", "pickle5"} & set(loaded.split())
    for path in FILES:
        text = path.read_text()
        assert not any(word in text for word in ("pickle", "eval(", "exec(", "allow_pickle")), path
