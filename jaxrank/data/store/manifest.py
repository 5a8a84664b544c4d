"""The manifest of a store: a sealed JSON file with a format version."""

from collections.abc import Mapping
from typing import Any

from upath import UPath

from jaxrank import renames
from jaxrank.errors import InputError
from jaxrank.json_files import Seal

FORMAT_VERSION = 5
_WITHOUT_HISTORY = 4  # see `Store.history`
_UNDER_EARLIER_NAMES = 3  # see `renames`
SEAL = Seal("checksum", of_bytes=True, hint=" Prepare the data again.")


def read(file: UPath) -> dict[str, Any]:
    """Reads a manifest. Names of version 3 are replaced by the current ones.

    Raises:
        InputError: the file is not a manifest, has another version, or was modified.
        KeyError: it has no version.
    """
    tree = SEAL.read(file, lambda tree: _check_version(file, tree))
    if tree["format_version"] == _UNDER_EARLIER_NAMES:
        tree = renames.manifest(tree)
    if tree["format_version"] <= _WITHOUT_HISTORY:
        tree = {**tree, "history": {}}
    return tree


def _check_version(file: UPath, tree: Mapping[str, Any]) -> None:
    version = tree["format_version"]
    if version not in (_UNDER_EARLIER_NAMES, _WITHOUT_HISTORY, FORMAT_VERSION):
        raise InputError(
            f"{file}: the store's format version must be {FORMAT_VERSION}, found {version!r}"
            f" (written by jaxrank {tree.get('jaxrank_version')}).{SEAL.hint}"
        )
