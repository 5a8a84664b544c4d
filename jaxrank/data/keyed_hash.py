"""Keyed hashes of raw values, so that files reveal nothing without the key."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from jaxrank.errors import InputError

Pseudonymise = Callable[[str], str]

_MIN_KEY_BYTES = 16
_MAX_KEY_BYTES = 64  # maximum of BLAKE2b


def read_key(path: str) -> bytes:
    """Returns the bytes of a key file without a final line break.

    Raises:
        InputError: it cannot be read, is too short, or is too long.
    """
    try:
        key = Path(path).read_bytes().removesuffix(b"\n").removesuffix(b"\r")
    except OSError as error:
        raise InputError(f"--hash-key-file: {path}: must be readable: found {error}.") from error
    if not _MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
        raise InputError(
            f"--hash-key-file: {path}: must have from {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} bytes:"
            f" found {len(key)}."
        )
    return key


def pseudonymise(key: bytes) -> Pseudonymise:
    """Returns a function that maps a value to 32 hexadecimal digits: BLAKE2b with this key (RFC
    7693).
    """

    def hashed(value: str) -> str:
        return hashlib.blake2b(value.encode(), digest_size=16, key=key).hexdigest()

    return hashed


def pseudonymised(values: pa.Array, hashed: Pseudonymise) -> pa.Array:
    """Hashes the strings of an array. Null stays null."""
    return pa.array([None if v is None else hashed(v) for v in values.to_pylist()], pa.string())


def fingerprint(key: bytes) -> str:
    """Returns a fingerprint that differs between keys and does not reveal the key."""
    return pseudonymise(key)("jaxrank")
