"""A store's manifest: a sealed JSON file of one version of the format."""

from collections.abc import Mapping
from typing import Any

from upath import UPath

from jaxrank import renames
from jaxrank.errors import InputError
from jaxrank.json_files import Seal

FORMAT_VERSION = 4
_UNDER_EARLIER_NAMES = 3  # see `renames`
SEAL = Seal("checksum", of_bytes=True, hint=" Prepare the data again.")


def read(file: UPath) -> dict[str, Any]:
    """The manifest in a file, as it was written; one of version 3 under the names of this one.

    Raises:
        InputError: it is no manifest, or of another version, or was changed.
        KeyError: it lacks its version.
    """
    tree = SEAL.read(file, lambda tree: _check_version(file, tree))
    is_earlier = tree["format_version"] == _UNDER_EARLIER_NAMES
    return renames.manifest(tree) if is_earlier else tree


def _check_version(file: UPath, tree: Mapping[str, Any]) -> None:
    version = tree["format_version"]
    if version not in (_UNDER_EARLIER_NAMES, FORMAT_VERSION):
        raise InputError(
            f"{file}: the store's format version must be {FORMAT_VERSION}, found {version!r}"
            f" (written by jaxrank {tree.get('jaxrank_version')}).{SEAL.hint}"
        )
