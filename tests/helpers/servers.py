"""Local web servers for a folder."""

import contextlib
import functools
import http.server
import re
import threading

import pytest


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Supports range requests, like most servers but not that of the standard library."""

    def do_GET(self):
        with open(self.translate_path(self.path), "rb") as file:
            content = file.read()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        self.send_response(206 if asked else 200)
        if asked:
            first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
            content = content[first : last + 1]
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class NoSize(http.server.SimpleHTTPRequestHandler):
    """Sends files without their size."""

    def send_header(self, keyword, value):
        if keyword != "Content-Length":
            super().send_header(keyword, value)


class NoMark(http.server.SimpleHTTPRequestHandler):
    """Sends files without a header by which a change could be detected."""

    def send_header(self, keyword, value):
        if keyword != "Last-Modified":
            super().send_header(keyword, value)


@contextlib.contextmanager
def serving(folder, kind=http.server.SimpleHTTPRequestHandler):
    """Serves a folder within the context, and yields its URL."""
    pytest.importorskip("aiohttp")

    class Quiet(kind):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, args=[0.02], daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
