"""Opens a page in a headless Chromium, through its debugging protocol."""

import asyncio
import base64
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import aiohttp

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
_FLAGS = [
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
]
_SECONDS = 60  # until a browser that does not answer fails the test


def installed():
    """Returns the path of a Chromium, or "". CHROMIUM names one that is not on the PATH."""
    paths = [os.environ.get("CHROMIUM", ""), *map(shutil.which, _NAMES)]
    return next((path for path in paths if path), "")


class Tab:
    """A page in a browser. `events` are messages of the browser so far."""

    def __init__(self, socket):
        self._socket, self._calls, self.events = socket, 0, []

    async def call(self, method, **params):
        self._calls += 1
        await self._socket.send_json({"id": self._calls, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=_SECONDS)
            if message.get("id") == self._calls:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    async def value(self, expression):
        """Evaluates JavaScript in the page."""
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def resize(self, width, height, *, mobile):
        size = dict(width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def open(self, url):
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        self.events.clear()
        await self.call("Page.navigate", url=url)
        while not any(e["method"] == "Page.loadEventFired" for e in self.events):
            self.events.append(await self._socket.receive_json(timeout=_SECONDS))

    async def picture(self, height):
        """Returns a PNG of the upper part of the page."""
        width = await self.value("innerWidth")
        clip = dict(x=0, y=0, width=width, height=height, scale=1)
        result = await self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(result["data"])


def visit(use):
    """Starts a browser, and returns the result of the coroutine `use(tab)`."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = [*_FLAGS, f"--user-data-dir={profile}"]
        if os.geteuid() == 0:  # Chromium has no sandbox for root
            flags.append("--no-sandbox")
        command = [installed(), *flags, "about:blank"]
        browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return asyncio.run(_visit(_port(Path(profile), browser), use))
        finally:
            browser.terminate()
            browser.wait()


def _port(profile, browser):
    file, end = profile / "DevToolsActivePort", time.monotonic() + _SECONDS
    while not file.exists() or "\n" not in file.read_text():
        assert browser.poll() is None, "the browser ended"
        assert time.monotonic() < end, "the browser does not answer"
        time.sleep(0.05)
    return file.read_text().split()[0]


async def _visit(port, use):
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            tabs = await answer.json(content_type=None)
        (url,) = (tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        async with session.ws_connect(url, max_msg_size=0) as socket:
            return await use(Tab(socket))
