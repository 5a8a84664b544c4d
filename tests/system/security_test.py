"""Nothing that is read can make the program run code."""

import ast
import re

import pytest
from checkout import ROOT

CALLS = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml", "code"}
# What a program hands to the processes that it starts, in memory that no other can write.
HANDED = {"reduction": "jaxrank/data/batches/shared_memory.py"}
FILES = sorted((ROOT / "jaxrank").rglob("*.py"))


def names(node):
    """The dotted name of what is called."""
    if isinstance(node, ast.Attribute):
        return f"{names(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@pytest.mark.parametrize("file", FILES, ids=[str(f.relative_to(ROOT)) for f in FILES])
def test_no_code_is_made_of_data(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [getattr(node, "module", "") or "", *(a.name for a in node.names)]
            parts = {part for m in modules for part in m.split(".")}
            assert not MODULES & parts, ast.unparse(node)
            for part in HANDED.keys() & parts:
                assert str(file.relative_to(ROOT)) == HANDED[part], ast.unparse(node)
        if isinstance(node, ast.Call):
            called = names(node.func)
            assert called not in CALLS, ast.unparse(node)
            if called.endswith(("np.load", "numpy.load")):
                pickled = [k for k in node.keywords if k.arg == "allow_pickle"]
                assert [ast.unparse(k.value) for k in pickled] == ["False"], ast.unparse(node)
            assert not re.search(r"(os\.system|os\.popen|torch\.load)$", called), ast.unparse(node)
            shell = [k for k in node.keywords if k.arg == "shell"]
            assert not shell, ast.unparse(node)
