"""Calls an ASGI application in the process."""

import asyncio
import json
import re
from typing import NamedTuple

from declarations import mismatches
from jaxrank_serving.server import protocol


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body, parse_constant=no_constant)


def no_constant(text):
    """Rejects NaN and infinity, which JSON does not have."""
    raise ValueError(text)


def scope(method, path, headers):
    return {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(k.lower().encode(), str(v).encode()) for k, v in headers.items()],
    }


async def call(app, method, path, body=b"", headers=(), receive=None):
    """Returns the answer to one request, which must be as declared. receive: replaces the body."""
    request = body
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    sent = []

    async def whole():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    await app(scope(method, path, dict(headers)), receive or whole, send)
    start, content = sent
    names = {k.decode(): v.decode() for k, v in start["headers"]}
    assert int(names["content-length"]) == len(content["body"])
    answer = Answer(start["status"], names, content["body"])
    _check_answer("GET" if method == "HEAD" else method, path, answer)
    if answer.status == 200 and isinstance(request, dict):
        _check_request(method, path, request)
    return answer


def _check_answer(method, path, answer):
    """Raises AssertionError unless an answer of the server is that of its route, or an error."""
    if answer.headers["content-type"] != "application/json":
        return
    if answer.status not in (200, 409, 503):
        assert not mismatches(answer.json, protocol.Error), answer
        return
    (route,) = [r for r in protocol.ROUTES if _is_path(path, r.path) and r.method == method]
    assert not (errors := mismatches(answer.json, route.answer)), (path, errors)


def _check_request(method, path, body):
    """Raises AssertionError unless the server's routes declare a body that it has accepted."""
    for route in protocol.ROUTES:
        if route.request and _is_path(path, route.path) and route.method == method:
            assert not (errors := mismatches(body, route.request)), (path, errors)


def _is_path(path, declared):
    return re.fullmatch(re.sub("NAME|VERSION", "[^/]+", declared), path.rstrip("/"))


def get(app, path):
    return asyncio.run(call(app, "GET", path))


def post(app, path, body=b"", headers=(), receive=None):
    return asyncio.run(call(app, "POST", path, body, headers, receive))
