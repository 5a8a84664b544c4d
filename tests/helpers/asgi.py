"""Calls an ASGI application in the process."""

import asyncio
import json
from typing import NamedTuple


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
    """Returns the answer to one request. receive: replaces the whole body."""
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
    return Answer(start["status"], names, content["body"])


def get(app, path):
    return asyncio.run(call(app, "GET", path))


def post(app, path, body=b"", headers=(), receive=None):
    return asyncio.run(call(app, "POST", path, body, headers, receive))
