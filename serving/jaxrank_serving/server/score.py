"""The protocol of /v1/score: {"context": {...}, "candidates": [...]} -> {"scores": {...}}."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrank_serving.requests import Candidates
from jaxrank_serving.server.messages import HttpError, Response, json_response, parse_json
from jaxrank_serving.server.model import Model

_KEYS = ("context", "candidates")


class Features(NamedTuple):
    """Raw features of a request, as `Scorer.encode` takes them, and the number of candidates."""

    context: Mapping[str, Any]
    candidates: Candidates
    rows: int


class Call(Protocol):
    """A request of one protocol. Its methods run in the thread of the batcher."""

    def features(self, model: Model, most: int) -> Features:
        """Parses the body.

        Args:
            most: number of candidates. A request with more may be rejected here already.

        Raises:
            HttpError: it is invalid.
        """
        ...

    def response(self, model: Model, scores: Mapping[str, np.ndarray]) -> Response:
        """Returns the response with the scores of each output."""
        ...


class ScoreCall:
    """A request of /v1/score."""

    def __init__(self, body: bytes):
        self._body = body

    def features(self, model: Model, most: int) -> Features:
        """Parses the body. Raises HttpError if it is invalid."""
        tree = parse_json(self._body)
        for key in tree:
            if key not in _KEYS:
                raise HttpError(
                    400, f"{key:.80}: must be one of {', '.join(_KEYS)}: found {key!r:.80}.", key
                )
        context, candidates = tree.get("context", {}), tree.get("candidates")
        if not isinstance(context, dict):
            raise HttpError(400, f"context: must be an object: found {context!r:.80}.", "context")
        if not isinstance(candidates, list | dict):
            raise HttpError(
                400,
                "candidates: must be a list of objects, or an object of columns: found"
                f" {candidates!r:.80}.",
                "candidates",
            )
        return Features(context, candidates, _count(candidates))

    def response(self, model: Model, scores: Mapping[str, np.ndarray]) -> Response:
        """Returns the response with the scores of each output."""
        tree = {
            "model": model.name,
            "version": model.version,
            "scores": {name: values.tolist() for name, values in scores.items()},
        }
        return json_response(tree)


def _count(candidates: list | dict) -> int:
    if isinstance(candidates, list):
        return len(candidates)
    lengths = (len(values) for values in candidates.values() if isinstance(values, list))
    return max(lengths, default=0)
