"""A headless Chromium, driven through the pipe of its DevTools protocol.

Messages are JSON, ended by a zero byte, on the descriptors 3 (to it) and 4 (from it).
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "--disable-background-networking",
    "--disable-component-update",
)
_EXEC = """
import os, sys
high = [int(number) for number in sys.argv[1:3]]
while min(high) < 5:
    high = [os.dup(end) for end in high]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""A program that puts the ends of two pipes on 3 and 4, and becomes another."""


def executable() -> str | None:
    """The path of a Chromium, if one is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """One tab; ``errors`` are what pages wrote to the console or threw."""

    def __init__(self, folder: Path, *, width: int = 1280, height: int = 900) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._number, self._buffer = 0, b""
        self._session: str | None = None
        path = executable()
        assert path is not None
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        command = [path, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _EXEC, str(to_read), str(to_write), *command],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        (target,) = [
            one
            for one in self.call("Target.getTargets")["targetInfos"]
            if one["type"] == "page"
        ]
        attached = self.call(
            "Target.attachToTarget", targetId=target["targetId"], flatten=True
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def open(self, path: Path) -> None:
        """Load a page and wait until its timelines are drawn."""
        self.load(path)
        self.run("ready")

    def load(self, path: Path) -> None:
        """Load a page from a file and wait until all of it is there."""
        self.go(path.resolve().as_uri())

    def go(self, url: str) -> None:
        """Load a page from a server, as `load` does from a file."""
        self.call("Page.navigate", url=url)
        self.run(
            "new Promise((done) => document.readyState === 'complete' ? done() "
            ": addEventListener('load', done))"
        )

    def run(self, expression: str) -> Any:
        """Evaluate an expression in the page; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate",
            expression=expression,
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Send a pointer event as a mouse would; see Input.dispatchMouseEvent."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.errors.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(json.dumps(params["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._from, 1 << 20)
            assert data, "Chromium has ended"
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def close(self) -> None:
        """End the browser and all of its processes."""
        self._session = None
        with contextlib.suppress(AssertionError, BrokenPipeError):
            self.call("Browser.close")
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)
