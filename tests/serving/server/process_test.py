"""The server as a process: signals, slow clients, and a kill while it loads a newer version."""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading

import pytest
import uvicorn
from bundles import CONTEXT, candidates, other_version, point
from checkout import ROOT
from jaxrank_serving.server import serve as serving
from jaxrank_serving.server import settings
from jaxrank_serving.server.messages import Response, respond
from uvicorn.server import ServerState

BODY = json.dumps({"context": CONTEXT, "candidates": candidates(3)})
WITHOUT_JAXRANK = ("-m", "jaxrank_serving.server")
BY_JAXRANK = ("-m", "jaxrank", "serve")


@contextlib.contextmanager
def running(bundle, module, *flags):
    """Yields a process and its port."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'serving'}"}
    command = [sys.executable, *module, str(bundle), "--port=0", "--timeout-ms=60000", *flags]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            lines = iter(process.stdout.readline, "")
            text = next((line for line in lines if "Serving" in line), "")
            yield process, int(re.search(r"http://127.0.0.1:(\d+)$", text)[1])
        finally:
            process.kill()


def post(connection, path="/v1/score", body=BODY):
    connection.request("POST", path, body)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


class Clients:
    """Threads that send requests until the server closes their connections."""

    def __init__(self, port, count=3):
        self.versions, self.failures = [], []
        self.first = threading.Barrier(count + 1, timeout=60)
        self._threads = [threading.Thread(target=self._send, args=[port]) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _send(self, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.auto_open = 0
        connection.connect()
        waits = True
        while True:
            try:
                status, tree = post(connection)
            except (http.client.NotConnected, http.client.RemoteDisconnected, OSError):
                return  # the server has announced it in its last response, or was idle
            if status != 200:
                self.failures.append((status, tree))
                return
            self.versions.append(tree["version"])
            if waits:
                self.first.wait()
                waits = False

    def join(self):
        for thread in self._threads:
            thread.join()


def test_a_kill_during_a_reload_breaks_nothing_and_sigterm_ends_with_status_0(bundle, tmp_path):
    newer = other_version(bundle, tmp_path / "newer")
    point(tmp_path / "ads", bundle)
    with running(tmp_path / "ads", WITHOUT_JAXRANK, "--reload-seconds=0.001") as (process, port):
        clients = Clients(port)
        clients.first.wait()
        for target in [newer, bundle] * 5 + [newer]:
            point(tmp_path / "ads", target)
        process.send_signal(signal.SIGKILL)
        clients.join()
        assert not clients.failures
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ads", "newer"]

    with running(tmp_path / "ads", BY_JAXRANK, "--reload-seconds=0") as (process, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        status, tree = post(connection)
        assert status == 200
        first = tree["version"]
        # A request that is half sent does not keep others waiting, and is finished after SIGTERM.
        with socket.create_connection(("127.0.0.1", port), timeout=60) as slow:
            head = f"POST /v1/score HTTP/1.1\r\nHost: a\r\nContent-Length: {len(BODY)}\r\n\r\n"
            slow.sendall(head.encode() + BODY[:10].encode())
            while "jaxrank_active_requests 0.0" in metrics(connection):
                pass
            clients = Clients(port)
            clients.first.wait()
            point(tmp_path / "ads", bundle)
            assert post(connection, "/v2/repository/models/ads/load", b"")[1]["loaded"]
            second = post(connection)[1]["version"]
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline().startswith("Loaded version")
            assert "Received SIGTERM: finishing" in process.stdout.readline()
            slow.sendall(BODY[10:].encode())
            assert slow.recv(100).startswith(b"HTTP/1.1 200 OK")
        assert process.wait(60) == 0
        clients.join()
        assert not clients.failures
        assert set(clients.versions) == {first, second}
        assert first != second


def test_a_key_is_read_without_its_line_break(bundle, tmp_path):
    (tmp_path / "key").write_bytes(b"0123456789abcdef\r\n")
    key = settings.Settings(bundle, hash_key_file=str(tmp_path / "key")).hash_key()
    assert key == b"0123456789abcdef"


def test_the_page_names_flags_that_exist():
    parser = argparse.ArgumentParser()
    settings.add_flags(parser)
    page = (ROOT / "docs" / "server.md").read_text()
    flags = {f for action in parser._actions for f in action.option_strings}
    assert len(set(re.findall(r"`(--[\w-]+)`", page)) & flags) > 8
    assert set(re.findall(r"`(--[\w-]+)`", page)) <= flags


def metrics(connection):
    connection.request("GET", "/metrics")
    return connection.getresponse().read().decode()


def test_a_port_in_use_is_reported(bundle):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(settings.SettingsError, match=f"127.0.0.1:{port}: found .*in use"):
            serving.serve(settings.Settings(bundle, port=port))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"port": 70000}, "--port: must be at least 0 and at most 65535: found 70000"),
        ({"timeout_ms": 0}, "--timeout-ms: must be at least 1"),
        ({"batch_sizes": (8, 0)}, "--batch-sizes: must be at least 1 .*found 0"),
        ({"name": "a/b"}, "--name: must be a name without '/': found 'a/b'"),
        ({"hash_key_file": "/nothing"}, "--hash-key-file: must be readable: found .*No such file"),
    ],
)
def test_settings_are_checked(bundle, changes, message):
    with pytest.raises(settings.SettingsError, match=message):
        settings.Settings(bundle, **changes).hash_key()


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self):
        super().__init__()
        self.written, self.closed = b"", asyncio.Event()

    def write(self, data):
        self.written += data

    def close(self):
        self.closed.set()

    def is_closing(self):
        return self.closed.is_set()

    def pause_reading(self):
        """Does nothing."""

    resume_reading = pause_reading


@pytest.mark.parametrize("received", [b"", b"GET / HTTP/1.1\r\nHo"])
def test_a_connection_without_whole_headers_is_closed(received, monkeypatch):
    monkeypatch.setattr(serving, "_HEADER_SECONDS", 0.01)

    async def connect():
        protocol, transport = connected()
        if received:
            protocol.data_received(received)
        await asyncio.wait_for(transport.closed.wait(), 60)

    asyncio.run(connect())


def test_headers_have_a_limit_and_bodies_do_not():
    async def connect():
        protocol, transport = connected()
        protocol.data_received(b"GET / HTTP/1.1\r\nA: " + b"a" * 40_000)
        assert not transport.is_closing()
        protocol.data_received(b"a" * 40_000)
        assert transport.written.startswith(b"HTTP/1.1 400 Bad Request")
        assert transport.is_closing()
        protocol, transport = connected()
        protocol.data_received(b"POST / HTTP/1.1\r\nContent-Length: 90000\r\n\r\n" + b"a" * 80_000)
        protocol.data_received(b"a" * 10_000)
        assert not transport.is_closing()
        await asyncio.gather(*protocol.tasks)
        assert transport.written.startswith(b"HTTP/1.1 200 OK")

    asyncio.run(connect())


def connected():
    async def answer(scope, receive, send):
        while (await receive())["more_body"]:
            pass
        await respond(send, Response(200, b""))

    config = uvicorn.Config(answer, ws="none", log_config=None)
    protocol = serving._Protocol(config, ServerState(), {}, asyncio.get_running_loop())
    transport = Transport()
    protocol.connection_made(transport)
    return protocol, transport
