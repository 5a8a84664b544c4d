"""Allowed imports between packages, read from the source."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT

PACKAGE = ROOT / "jaxrank"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_MODULES = 12  # of a folder, the top level excepted

# Modules and packages of the top level, lowest floor first: imports go only downwards.
FLOORS = (
    "errors atomic renames signals features losses shipped records",
    "json_files validate base_rates outputs layout mesh report plots run_schedule native"
    " request_losses",
    "extensions",
    "data embedding models metrics optim runtime task_losses calibration",
    "step config config_lines",
    "program checkpoints telemetry config_files config_reference",
    "build workdir flags defaults",
    "opening",
    "placement evaluation",
    "run loop batch_statistics export aot run_report",
    "warm_start bench explain",
    "train",
    "studies selftest",
    "model_check",
    "cli",
)
DATA_FLOORS = (
    "file_names guard",
    "spec examples ragged chunk files file_kinds pipes lock keyed_hash",
    "statistics rejects",
    "encode",
    "synthetic",
    "sources",
    "store",
    "prepare drift batches vectors",
)
ENTRY = "__main__"  # above all floors
# The builder, which alone reads fields of a whole config.
BUILDER = (
    *("config.py", "config_lines.py", "config_files.py"),
    *("defaults.py", "build.py", "opening.py", "run.py"),
)


def module_name(path: Path) -> str:
    """The dotted name of a file of the package."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """The nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path: Path) -> set[str]:
    """Full names of all modules that a file imports, inside functions and for types too."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def imported_modules(path: Path) -> set[str]:
    """The modules of the package that a file imports; `b` of `from a import b` if it is one."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in MODULES else node.module)
    return names & MODULES.keys()


def importers(module: str) -> set[str]:
    """Files, relative to the package, that import `module` or something in it."""
    return {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(name == module or name.startswith(f"{module}.") for name in imports(path))
    }


def module_floors(floors: tuple[str, ...]) -> dict[str, int]:
    return {name: number for number, names in enumerate(floors) for name in names.split()}


def upward_imports(folder: str, floors: tuple[str, ...]) -> list[str]:
    """Imports between parts of a folder that do not go to a lower floor."""
    floor = module_floors(floors)
    upward = []
    for name, path in MODULES.items():
        for other in imported_modules(path):
            if not (name.startswith(f"{folder}.") and other.startswith(f"{folder}.")):
                continue
            parts = [m.removeprefix(f"{folder}.").partition(".")[0] for m in (name, other)]
            above, below = parts
            if above != below and above != ENTRY and not floor[above] > floor[below]:
                upward.append(f"{name} -> {other}")
    return upward


def test_the_reader_of_imports_sees_them():
    assert "step.py" in importers("jax")
    assert "cli.py" in importers("jaxrank.train")
    assert "jaxrank.train" in imported_modules(PACKAGE / "cli.py")
    assert "jaxrank.mesh" in imported_modules(PACKAGE / "step.py")  # from jaxrank import mesh


@pytest.mark.parametrize(("folder", "floors"), [("jaxrank", FLOORS), ("jaxrank.data", DATA_FLOORS)])
def test_imports_go_to_lower_floors_only(folder, floors):
    path = ROOT / folder.replace(".", "/")
    parts = {p.stem for p in path.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert parts - {"__init__", ENTRY} == module_floors(floors).keys()
    assert not upward_imports(folder, floors)


def test_no_module_of_the_package_is_imported_by_a_string():
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
                assert "jaxrank" not in ast.unparse(node), path


def test_no_module_imports_itself_through_others():
    graph = {name: imported_modules(path) - {name} for name, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_no_folder_has_more_than_twelve_modules():
    for folder in {path.parent for path in FILES} - {PACKAGE}:
        modules = [path for path in folder.glob("*.py") if path.stem != "__init__"]
        assert len(modules) <= MAX_MODULES, folder


def test_the_page_on_architecture_has_the_tree_and_the_floors():
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = re.findall(r"^\| `([\w/]+)/` \|", page, re.MULTILINE)
    assert len(set(packages)) == len(packages)
    folders = {str(path.parent.relative_to(PACKAGE)) for path in FILES} - {"."}
    assert set(packages) == folders
    top = set(re.findall(r"^\| `(\w+)\.py` \|", page, re.MULTILINE))
    assert top == {path.stem for path in PACKAGE.glob("*.py")} - {"__init__", ENTRY}
    floors = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    listed = [re.findall(r"`(\w+)/?`", names) for _, names in floors]
    assert listed == [names.split() for names in (*FLOORS, *DATA_FLOORS)]


def test_data_never_imports_jax():
    reached, waiting = set(), [name for name in MODULES if name.startswith("jaxrank.data")]
    assert len(waiting) > 50
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            imported = imported_modules(MODULES[name])
            # Python runs the `__init__` of every package above a module first.
            above = {other.rpartition(".")[0] for other in imported | {name}} & MODULES.keys()
            waiting += imported | above
    libraries = ("jax", "jaxlib", "flax", "optax", "orbax")
    for name in reached:
        used = {n.split(".")[0] for n in imports(MODULES[name])}
        assert not used & set(libraries), name


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("flax", ("models/",)),
        ("orbax", ("checkpoints/",)),
        ("tensorboardX", ("telemetry/writers.py",)),
        ("absl.flags", ("config_files.py",)),
        ("matplotlib", ("plots.py",)),
        ("PIL", ("telemetry/reliability_image.py",)),
        ("optax", ("optim.py", "step.py")),
        ("onnx", ("export/onnx/",)),
        ("onnxruntime", ("export/onnx/",)),
    ],
)
def test_only_its_own_module_imports(module, allowed):
    files = importers(module)
    assert files
    assert not [file for file in files if not file.startswith(allowed)]


# Libraries may change such state when they are imported, so they come before the comparison.
STATE = """
import importlib, logging, os, signal, sys, threading, warnings
libraries, modules = (names.split() for names in sys.argv[1:])
def state():
    names = logging.Logger.manager.loggerDict
    loggers = [logging.getLogger(), *(logging.getLogger(n) for n in names)]
    return {
        "environment": dict(os.environ),
        "hooks": (sys.unraisablehook, sys.excepthook, threading.excepthook, sys.displayhook),
        "logging": {
            l.name: (l.level, list(l.handlers), list(l.filters), l.propagate, l.disabled)
            for l in loggers
        },
        "all logging": (logging.root.manager.disable, warnings.showwarning),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "warnings": list(warnings.filters),
        "threads": threading.active_count(),
    }
for name in libraries:
    importlib.import_module(name)
before = state()
for name in modules:
    importlib.import_module(name)
after = state()
for name, value in before.items():
    if name == "logging":  # a new logger without settings is no change
        unset = (logging.NOTSET, [], [], True, False)
        value = {n: value.get(n, unset) for n in after[name]}
    if after[name] != value:
        print(name, value, after[name])
"""


def test_importing_a_module_changes_nothing_else():
    ours = [name for name in MODULES if not name.endswith(ENTRY)]
    libraries = {
        name
        for path in FILES
        for name in imports(path)
        if name.split(".")[0] in ("jax", "flax", "optax", "orbax", "absl", "tensorboardX", "scipy")
    }
    libraries |= {"matplotlib.figure", "pyarrow.parquet", "tensorstore", "apache_beam", "fsspec"}
    modules = []
    for name in sorted(libraries):
        try:
            __import__(name)
        except ImportError:  # a function or class of one
            continue
        modules.append(name)
    command = [sys.executable, "-c", STATE, " ".join(modules), " ".join(ours)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def config_reads(tree: list[ast.AST]) -> list[str]:
    """Reads and writes of fields of a whole config, and methods called on it.

    A whole config is what is called `config` or `..._config`: an argument, a variable, an attribute
    of anything, an entry of a dict or the result of a function. It is also a variable to which one
    of these is assigned, and any other argument whose type is a ConfigDict.
    """
    names = {node.arg for node in tree if isinstance(node, ast.arg) and _is_dict(node)}

    def is_config(node: ast.AST) -> bool:
        if isinstance(node, ast.NamedExpr):
            return is_config(node.value)
        if isinstance(node, ast.IfExp):
            return is_config(node.body) or is_config(node.orelse)
        if isinstance(node, ast.BoolOp):
            return any(map(is_config, node.values))
        if isinstance(node, ast.Call):
            return _name(node.func).endswith("_config")
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            return node.slice.value == "config"
        if isinstance(node, ast.Attribute) and _name(node.value) == "jax":
            return False
        return f"_{_name(node)}".endswith("_config") or _name(node) in names

    assigned = [pair for node in tree for pair in _assigned(node)]
    before: set[str] | None = None
    while before != names:  # a variable may be assigned to another one
        before = set(names)
        names |= {_name(target) for target, value in assigned if is_config(value)} - {""}
    return [
        ast.unparse(node)
        for node in tree
        if isinstance(node, ast.Attribute | ast.Subscript) and is_config(node.value)
    ]


def _assigned(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yields each target of an assignment with its value."""
    if isinstance(node, ast.NamedExpr) or (isinstance(node, ast.AnnAssign) and node.value):
        yield node.target, node.value
    for target in node.targets if isinstance(node, ast.Assign) else ():
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=True)
        else:
            yield target, node.value


def _name(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def _is_dict(argument: ast.arg) -> bool:
    return argument.annotation is not None and "ConfigDict" in ast.unparse(argument.annotation)


@pytest.mark.parametrize(
    ("code", "reads"),
    [
        ("def f(config): return g(config, run.config)", []),
        ("def f(run): self._config = run.config; return to_plain(self._config)", []),
        ("def f(config): return config if older is None else inherit(config, older)", []),
        ("def f(config): jax.config.update('a', 1); return renames.config(config)", []),
        ("def f(run): return run.config.data.valid", ["run.config.data"]),
        ("def f(self): self.saved._config.seed = 1", ["self.saved._config.seed"]),
        ("def f(x: ConfigDict): return x.seed", ["x.seed"]),
        ("def f(run): c = run.config; d = c; return d.seed", ["d.seed"]),
        ("def f(run): c, n = run.config, 1; return c['seed']", ["c['seed']"]),
        ("def f(self, config): self.base = config; return self.base.seed", ["self.base.seed"]),
        ("def f(run): return run.plain_config['seed']", ["run.plain_config['seed']"]),
        ("def f(tree): return tree['config']['seed']", ["tree['config']['seed']"]),
        ("def f(run): return (run.config or other).seed", ["(run.config or other).seed"]),
        ("def f(config):\n with config.unlocked(): pass", ["config.unlocked"]),
        ("def f(path): return load_config(path).seed", ["load_config(path).seed"]),
    ],
)
def test_the_reader_of_configs_sees_their_fields(code, reads):
    assert config_reads(list(ast.walk(ast.parse(code)))) == reads


def test_only_the_builder_reads_fields_of_a_whole_config():
    """Others get sections and parts. They pass a config on, or store it."""
    found = {path.relative_to(PACKAGE).as_posix(): config_reads(nodes(path)) for path in FILES}
    assert not {name: reads for name, reads in found.items() if reads and name not in BUILDER}
    assert [name for name in BUILDER if not found[name]] == []
