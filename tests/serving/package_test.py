"""The scorer is a package of its own: it needs NumPy, ONNX Runtime and xxhash, and no JAX.

Its server also needs the packages of the extra `server`, and only it does.
"""

import ast
import re
import subprocess
import sys
import tomllib

from checkout import ROOT

FILES = sorted((ROOT / "serving" / "jaxrank_serving").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "serving" / "pyproject.toml").read_text())["project"]


def package_names(requirements):
    return {re.match(r"[\w.-]+", line)[0].replace("-", "_") for line in requirements}


DECLARED = package_names(PROJECT["dependencies"])
OF_SERVER = package_names(PROJECT["optional-dependencies"]["server"])


def test_it_declares_these_dependencies_only():
    assert {"numpy", "onnxruntime", "xxhash"} == DECLARED
    assert {"uvicorn", "httptools", "prometheus_client"} == OF_SERVER


def test_it_imports_no_other_packages():
    assert len(FILES) > 8
    for path in FILES:
        names, modules = set(), set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module.partition(".")[0])
                modules.add(node.module)
        is_server = path.parent.name == "server"
        allowed = DECLARED | {"jaxrank_serving"} | (OF_SERVER if is_server else set())
        assert names - set(sys.stdlib_module_names) <= allowed, path
        assert is_server or not any(m.startswith("jaxrank_serving.server") for m in modules), path


def test_no_module_of_it_loads_jax_or_evaluates_code():
    code = "import sys, jaxrank_serving.server.serve; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    path = [str(ROOT / "serving"), *(p for p in sys.path if p and p != str(ROOT))]
    env = {"PYTHONPATH": ":".join(path)}
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    assert not {"jax", "jaxrank", "pyarrow", "onnx", "pickle5"} & set(loaded.split())
    for path in FILES:
        text = path.read_text()
        assert not any(word in text for word in ("pickle", "eval(", "exec(", "allow_pickle")), path
