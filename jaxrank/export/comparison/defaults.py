"""Checks the values of columns that requests may omit, before any file is written."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from jaxrank import json_files
from jaxrank.errors import InputError
from jaxrank.export.comparison.raw_rows import RawRows

if TYPE_CHECKING:
    from jaxrank_serving.index import Index

# Parts of a signature that encoding does not read, and that are known later.
_LATER: dict[str, Any] = {
    "outputs": [],
    "index": {"file": "", "values": 0, "bits": 0, "steps": 0},
    "model": {"onnx": "", "stablehlo": "", "inputs": []},
    "calibration": None,
    "origin": {},
}


class _NoValues:
    """An index of empty vocabularies."""

    def rows(self, hashes: np.ndarray, absent: int) -> np.ndarray:
        """Returns i64[n], `absent` for each hash u64[n]."""
        return np.full(len(hashes), absent, np.int64)


def check_defaults(described: Mapping[str, Any], raw: RawRows, key: bytes | None) -> None:
    """Encodes a request that omits every column with a default.

    Args:
        described: the signature as far as it is known, with tables and stacks.
        raw: rows of the run's data. The other values of the request are those of the first one.
        key: of a store with keyed hashes.

    Raises:
        InputError: a default is a value that training rejects.
    """
    from jaxrank_serving.encoder import Encoder
    from jaxrank_serving.errors import RequestError
    from jaxrank_serving.requests import cells_of_request
    from jaxrank_serving.signature import parse

    signature = parse(json_files.plain({**_LATER, **described}))
    columns = {column.name: column for column in signature.columns}
    first = {name: values[0] for name, values in raw.batch.slice(0, 1).to_pydict().items()}
    context: dict[str, Any] = {}
    candidate: dict[str, Any] = {}
    for name, column in columns.items():
        if column.required:
            (context if column.source == "context" else candidate)[name] = first[name]
    encoder = Encoder(signature, cast("Index", _NoValues()), key)
    try:
        encoder.encode(*cells_of_request(context, [candidate], columns))
    except RequestError as error:
        raise InputError(f"--default: {error}") from error
