"""Raw values as keyed hashes, so that files tell nothing to those who do not have the key."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from jaxrank.errors import InputError

Pseudonymise = Callable[[str], str]

_LEAST_BYTES = 16
_MOST_BYTES = 64  # that BLAKE2b takes


def read_key(path: str) -> bytes:
    """The bytes of a key file, of which a last line break is no part.

    Raises:
        InputError: it cannot be read, is too short, or too long.
    """
    try:
        key = Path(path).read_bytes().removesuffix(b"\n").removesuffix(b"\r")
    except OSError as error:
        raise InputError(f"--hash-key-file: {path}: must be readable: found {error}.") from error
    if not _LEAST_BYTES <= len(key) <= _MOST_BYTES:
        raise InputError(
            f"--hash-key-file: {path}: must have from {_LEAST_BYTES} to {_MOST_BYTES} bytes: found"
            f" {len(key)}."
        )
    return key


def pseudonymise(key: bytes) -> Pseudonymise:
    """Makes of a value 32 hexadecimal digits: BLAKE2b with this key (RFC 7693)."""

    def hashed(value: str) -> str:
        return hashlib.blake2b(value.encode(), digest_size=16, key=key).hexdigest()

    return hashed


def pseudonymised(values: pa.Array, hashed: Pseudonymise) -> pa.Array:
    """The strings of an array, each hashed; null stays null."""
    return pa.array([None if v is None else hashed(v) for v in values.to_pylist()], pa.string())


def fingerprint(key: bytes) -> str:
    """Tells one key from another, and not what it is."""
    return pseudonymise(key)("jaxrank")
