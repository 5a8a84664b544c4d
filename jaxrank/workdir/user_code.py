"""WORKDIR/code.json: the files of the models, losses and metrics of users that a run was built of.

It has a checksum of each, which changes with the code. Nothing in it is imported.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrank import extensions, json_files
from jaxrank.errors import InputError
from jaxrank.runtime import processes

_NAME = "code.json"


def used(names: Collection[tuple[str, str]]) -> dict[str, dict[str, dict[str, str]]]:
    """Returns {kind: {name: {"file", "checksum"}}} of the code of users that a run uses.

    Args:
        names: see `config_files.code_names`. All metrics are used, too.
    """
    entries: dict[str, dict[str, dict[str, str]]] = {}
    for (kind, name), origin in extensions.origins().items():
        if kind == "metric" or (kind, name) in names:
            entry = {"file": origin.file, "checksum": origin.checksum}
            entries.setdefault(kind, {})[name] = entry
    return entries


def save(workdir: Path, names: Collection[tuple[str, str]]) -> None:
    """Writes the file, and removes an earlier one if the run has only the program's own code.

    Args:
        names: see `used`.
    """
    if entries := used(names):
        json_files.write(workdir / _NAME, entries)
    else:
        (workdir / _NAME).unlink(missing_ok=True)


def changes(workdir: Path) -> list[str]:
    """Returns a text for each file whose code is registered and differs from that of the run."""
    now = extensions.origins()
    by_file: dict[str, list[str]] = {}
    for kind, name, entry in _entries(workdir):
        origin = now.get((kind, name))
        if origin and origin.checksum != entry.get("checksum"):
            by_file.setdefault(origin.file, []).append(f"{kind} {name!r}")
    return [f"{file} ({', '.join(names)}) has changed" for file, names in by_file.items()]


def check(workdir: Path) -> None:
    """Rejects code that differs from that of the run in `workdir`.

    Raises:
        InputError: names each file that has changed.
    """
    with processes.together():
        if changed := changes(workdir):
            raise InputError(
                f"{workdir}: must resume with the code that it was trained with:"
                f" {', '.join(changed)}. Restore the file, use another --workdir, or continue with"
                " the new code by --allow-config-change."
            )


def advice(workdir: Path) -> str:
    """Returns a sentence with the file of the run's model, if it is known and not registered."""
    for kind, name, entry in _entries(workdir):
        if (kind, name) not in extensions.origins():
            return f" The run was trained with the {kind} {name!r} of {entry.get('file')}."
    return ""


def _entries(workdir: Path) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yields kind, name and {"file", "checksum"} of each object that the run was built of."""
    path = workdir / _NAME
    if not path.is_file():
        return
    for kind, names in json_files.read(path).items():
        for name, entry in names.items():
            yield kind, name, entry
