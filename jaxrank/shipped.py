"""Files that come with the program: configs and launch scripts."""

import ast
from pathlib import Path


def folder(name: str) -> Path:
    """The folder `configs` or `launch`: in the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "shipped" / name
    return installed if installed.is_dir() else package.parent / name


def configs() -> dict[str, str]:
    """The first line of each config's docstring, by name."""
    lines = {}
    for path in sorted(folder("configs").glob("*.py")):
        about = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines[path.stem] = about.partition("\n")[0]
    return lines
