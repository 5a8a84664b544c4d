"""Web servers of a folder, on this machine."""

import contextlib
import functools
import http.server
import re
import threading

import pytest


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Sends parts of files too, as most servers do and that of the standard library does not."""

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
    """Sends a file without telling its size."""

    def send_header(self, keyword, value):
        if keyword != "Content-Length":
            super().send_header(keyword, value)


class NoMark(http.server.SimpleHTTPRequestHandler):
    """Tells nothing by which a file that has changed could be known."""

    def send_header(self, keyword, value):
        if keyword != "Last-Modified":
            super().send_header(keyword, value)


@contextlib.contextmanager
def serving(folder, kind=http.server.SimpleHTTPRequestHandler):
    """The URL of a folder while it is served."""
    pytest.importorskip("aiohttp")

    class Quiet(kind):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, args=[0.02], daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
