"""A store's manifest: JSON, with a checksum of itself as its last value."""

import json
from collections.abc import Mapping
from typing import Any

import xxhash
from upath import UPath

from jaxrank.errors import InputError

FORMAT_VERSION = 3
_BEFORE_CHECKSUM = ',\n "checksum": "'


def to_text(tree: Mapping[str, Any]) -> str:
    """The manifest as text; a checksum that is there is replaced."""
    told = {key: value for key, value in tree.items() if key != "checksum"}
    content = json.dumps(told, indent=1).removesuffix("\n}")
    return content + _BEFORE_CHECKSUM + _checksum(content.encode()) + '"\n}\n'


def _checksum(content: bytes) -> str:
    return xxhash.xxh3_64(content).hexdigest()


def read(file: UPath) -> dict[str, Any]:
    """The manifest in a file, of this version and as it was written.

    Raises:
        InputError: it is no manifest, or of another version, or was changed.
        KeyError: it lacks its version or checksum.
    """
    content = file.read_bytes()
    try:
        manifest = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not readable as JSON: {error}.") from error
    if not isinstance(manifest, dict):
        raise InputError(
            f"{file}: must be a dict with a key 'format_version': found"
            f" {type(manifest).__name__}. Prepare the data again."
        )
    found = manifest["format_version"]
    if found != FORMAT_VERSION:
        raise InputError(
            f"{file}: the store's format version must be {FORMAT_VERSION}, found {found!r}"
            f" (written by jaxrank {manifest.get('jaxrank_version')}). Prepare the data again."
        )
    # Of the bytes: to write a large manifest again takes longer than to read it.
    body, mark, end = content.rpartition(_BEFORE_CHECKSUM.encode())
    if not mark or end.decode() != _checksum(body) + '"\n}\n':
        raise InputError(
            f"{file}: is corrupt: its checksum must be {_checksum(body)}, found"
            f" {manifest['checksum']!r}. Prepare the data again."
        )
    return manifest
