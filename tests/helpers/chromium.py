"""A page in headless Chromium, driven over the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import re
import shutil
import tempfile
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

WAIT_S = 60.0


def find_chromium() -> str | None:
    """The program, as Debian and others name it; None: it is not installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """A tab. `problems` are console errors, uncaught exceptions and refused loads so far."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = json.loads(await asyncio.wait_for(self._socket.receive_str(), WAIT_S))
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        kind, params = message.get("method"), message.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif kind == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif kind == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(params["args"]))
        elif kind == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def evaluate(self, expression: str) -> Any:
        result = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def wait_for(self, expression: str) -> None:
        async with asyncio.timeout(WAIT_S):
            while not await self.evaluate(f"Boolean({expression})"):  # noqa: ASYNC110 - a page can't notify
                await asyncio.sleep(0.02)

    async def size(self, width: int, height: int) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def theme(self, name: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": name}]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def open(self, url: str) -> None:
        await self.send("Page.navigate", url=url)
        await self.wait_for("document.documentElement?.dataset.ready")

    async def show(self, hash_: str) -> None:
        """Open a view by its hash, and wait until it is painted."""
        await self.evaluate(f"location.hash = {json.dumps(hash_)}")
        await self.evaluate(
            "new Promise(done => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 60))"
        )

    async def screenshot(self) -> bytes:
        """What is in sight, PNG."""
        shot = await self.send("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def page(program: str, *, width: int = 1280, height: int = 900):
    """A tab of a new browser, which ends with the block."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        process = await asyncio.create_subprocess_exec(
            program,
            *flags,
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            port = await _port(process.stderr)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = await answer.json()
                url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    tab = Page(socket)
                    for domain in ("Page", "Runtime", "Log", "Network"):
                        await tab.send(f"{domain}.enable")
                    await tab.size(width, height)
                    yield tab
        finally:
            process.kill()
            await process.wait()


async def _port(lines: asyncio.StreamReader | None) -> str:
    """The port that the browser says it listens at."""
    assert lines is not None
    seen = ""
    async with asyncio.timeout(WAIT_S):
        while line := (await lines.readline()).decode(errors="replace"):
            seen += line
            if found := re.search(r"ws://127\.0\.0\.1:(\d+)/", line):
                return found[1]
    raise AssertionError(f"Chromium has ended:\n{seen}")
