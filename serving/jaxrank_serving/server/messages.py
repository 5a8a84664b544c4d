"""Reads the bodies of requests and makes responses."""

import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, NoReturn

from jaxrank_serving.errors import RequestError

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = tuple[tuple[bytes, bytes], ...]


class HttpError(Exception):
    """A request that is answered with an error.

    Args:
        status: of HTTP.
        text: what must hold, and what was found.
        field: of the request or of the server's settings, or "".
        headers: of the response.
    """

    def __init__(self, status: int, text: str, field: str = "", headers: Headers = ()):
        super().__init__(text)
        self.status, self.text, self.field, self.headers = status, text, field, headers


class Response(NamedTuple):
    """A response with its whole body."""

    status: int
    body: bytes
    content_type: bytes = b"application/json"
    headers: Headers = ()


def json_response(tree: Any, status: int = 200, headers: Headers = ()) -> Response:
    """Returns a response whose body is JSON."""
    return Response(status, json.dumps(tree).encode(), headers=headers)


def error_response(error: HttpError) -> Response:
    """Returns the response that reports an error."""
    tree = {"error": error.text} | ({"field": error.field} if error.field else {})
    return json_response(tree, error.status, error.headers)


def internal_error() -> HttpError:
    """Returns the error of a failure of the server itself."""
    return HttpError(500, "The server failed. Its log has the reason.")


def too_many_candidates(most: int, found: int) -> HttpError:
    """Returns the error of a request with too many candidates."""
    return HttpError(400, f"candidates: must be at most {most:,}: found {found:,}.", "candidates")


def as_http_error(error: RequestError) -> HttpError:
    """Returns the response's error for an invalid value of a request."""
    return HttpError(400, str(error), error.column)


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number of JSON; null is a missing value")


# Not json.loads, which accepts NaN and infinity.
_DECODER = json.JSONDecoder(parse_constant=_reject_constant)


def parse_json(body: bytes, field: str = "body") -> dict[str, Any]:
    """Returns an object of JSON.

    Raises:
        HttpError: the text is no object of JSON.
    """
    try:
        tree = _DECODER.decode(body.decode())
    except RecursionError as error:
        raise HttpError(400, f"{field}: must not be nested this deeply.", field) from error
    except ValueError as error:  # also of UTF-8
        raise HttpError(400, f"{field}: must be JSON: {error}.", field) from error
    if not isinstance(tree, dict):
        raise HttpError(400, f"{field}: must be an object: found {tree!r:.80}.", field)
    return tree


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    """Returns the value of a header, or None."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1").strip()
    return None


async def read_body(headers: Iterable[tuple[bytes, bytes]], receive: Receive, most: int) -> bytes:
    """Returns the body of a request.

    Raises:
        HttpError: it has more bytes than `most`, is encoded, or the client disconnects.
    """
    encoding = header(headers, b"content-encoding")
    if encoding and encoding.lower() != "identity":
        raise HttpError(
            415, f"Content-Encoding: must be identity: found {encoding:.80}.", "Content-Encoding"
        )
    declared = header(headers, b"content-length") or ""
    if declared.isdecimal() and (len(declared) > 20 or int(declared) > most):
        raise _too_large(most, declared)
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HttpError(400, "body: must be complete: the client disconnected.", "body")
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise _too_large(most, f"{size:,} or more")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts) if len(parts) > 1 else part


def _too_large(most: int, actual: str) -> HttpError:
    return HttpError(413, f"body: must have at most {most:,} bytes: found {actual:.40}.", "body")


async def respond(send: Send, response: Response) -> None:
    """Sends a response."""
    headers = [
        (b"content-type", response.content_type),
        (b"content-length", str(len(response.body)).encode()),
        *response.headers,
    ]
    start = {"type": "http.response.start", "status": response.status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": response.body})
