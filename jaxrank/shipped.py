"""Files that come with the program: configs and launch scripts."""

import ast
from pathlib import Path


def folder(name: str) -> Path:
    """Returns the folder `configs` or `launch`, in the installed package or in the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "shipped" / name
    return installed if installed.is_dir() else package.parent / name


def configs() -> dict[str, str]:
    """Returns {name of a config: first line of its docstring}."""
    lines = {}
    for path in sorted(folder("configs").glob("*.py")):
        summary = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines[path.stem] = summary.partition("\n")[0]
    return lines
