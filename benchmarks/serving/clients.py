"""Requests with generated or recorded values, and connections that send them again and again."""

import dataclasses
import json
import random
import socket
from pathlib import Path
from typing import Any, NamedTuple

from jaxrank_serving.signature import Column, Signature


class Request(NamedTuple):
    """A request, and its bytes for HTTP."""

    context: dict[str, Any]
    candidates: Any
    http: bytes


def requests(
    signature: Signature, rows: list[dict[str, Any]], candidates: int, form: str
) -> list[Request]:
    """Returns different requests, whose candidates are rows in turn.

    Args:
        form: "columns" or "rows", how candidates are written.
    """
    shared = [column.name for column in signature.columns if column.source == "context"]
    others = [column.name for column in signature.columns if column.source != "context"]
    result = []
    for start in range(0, 16 * candidates, candidates):
        chosen = [rows[i % len(rows)] for i in range(start, start + candidates)]
        context = {name: chosen[0][name] for name in shared}
        if form == "columns":
            listed: Any = {name: [row[name] for row in chosen] for name in others}
        else:
            listed = [{name: row[name] for name in others} for row in chosen]
        body = json.dumps({"context": context, "candidates": listed}).encode()
        head = f"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        result.append(Request(context, listed, head.encode() + body))
    return result


def read_rows(path: str, signature: Signature) -> list[dict[str, Any]]:
    """Reads rows from a file of JSON objects, one a line. Generates them if `path` is empty."""
    if path:
        return [json.loads(line) for line in Path(path).read_text().splitlines()]
    r = random.Random(0)
    numbers = {feature.column for feature in signature.dense if not feature.separator}
    columns = [
        dataclasses.replace(c, type="float32") if c.name in numbers and c.type == "text" else c
        for c in signature.columns
    ]
    return [{c.name: _value(r, c) for c in columns} for _ in range(4000)]


def _value(r: random.Random, column: Column) -> Any:
    if column.is_list:
        return [_single(r, column.type) for _ in range(r.randint(0, 8))]
    return _single(r, column.type)


def _single(r: random.Random, kind: str) -> Any:
    if kind in ("text", "binary"):
        return f"{min(int(r.paretovariate(0.3)), 2**31):08x}"
    if kind.startswith("float"):
        return round(r.gauss(0, 1), 4)
    return r.randint(0, 1) if kind in ("bool", "int8", "uint8") else r.randint(0, 100)


class Connection:
    """A connection that stays open. It is opened again after an error."""

    def __init__(self, port: int):
        self._port = port
        self._socket: socket.socket | None = None

    def send(self, request: bytes) -> tuple[int, bytes]:
        """Sends a request and returns the status and body of its response.

        Raises:
            OSError: the connection has failed.
        """
        try:
            if self._socket is None:
                self._socket = socket.create_connection(("127.0.0.1", self._port), timeout=30)
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.sendall(request)
            return self._receive(self._socket)
        except OSError:
            if self._socket is not None:
                self._socket.close()
            self._socket = None
            raise

    def _receive(self, sock: socket.socket) -> tuple[int, bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._part(sock)
        head, _, body = data.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        size = int(fields[b"content-length"])
        while len(body) < size:
            body += self._part(sock)
        return int(head.split(b" ", 2)[1]), body

    def _part(self, sock: socket.socket) -> bytes:
        part = sock.recv(1 << 18)
        if not part:
            raise ConnectionResetError("the server closed the connection")
        return part
