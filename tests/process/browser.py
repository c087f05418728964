"""Chromium without a window, told what to do by the DevTools protocol over a pair of pipes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from tests.process.harness import wait_until

# The protocol's pipes are descriptors 3 and 4.
MOVE = """import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])"""
BINARY = shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One page. `said`: errors and warnings of its console, uncaught exceptions, and what could not be loaded."""

    def __init__(self, send_fd: int, receive_fd: int) -> None:
        self._send = os.fdopen(send_fd, "wb", 0)
        self._receive = os.fdopen(receive_fd, "rb", 0)
        self._numbers = 0
        self._part = b""
        self._session: str | None = None
        self.said: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._ask(f"{domain}.enable")
        self._ask("Emulation.setFocusEmulationEnabled", enabled=True)

    def close(self) -> None:
        """The whole browser."""
        self._session = None
        with contextlib.suppress(AssertionError, OSError):
            self._ask("Browser.close")
        self._send.close()
        self._receive.close()

    def open(self, address: str) -> None:
        self._ask("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """The value of an expression; promises are waited for. Raises AssertionError when it throws."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str) -> None:
        """Until the expression is true."""
        try:
            wait_until(lambda: self.run(script))
        except AssertionError as exc:
            raise AssertionError(
                f"{script}: {exc}; the page shows: {self.run('document.body.innerText')!s:.2000}"
            ) from None

    def press(self, key: str) -> None:
        text = key if len(key) == 1 else "\r" if key == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self._ask("Input.dispatchKeyEvent", type=kind, key=key, **more)

    def hold(self, element: str, *, is_down: bool) -> None:
        """Press the mouse's button in the middle of an element, or let it go there."""
        box = self.run(f"{element}.getBoundingClientRect().toJSON()")
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        kind = "mousePressed" if is_down else "mouseReleased"
        self._ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(self, width: int, height: int = 900, *, is_dark: bool = False) -> None:
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])

    def shoot(self, *, whole: bool = False) -> bytes:
        """A picture of what is seen, or of the whole page, as PNG."""
        return base64.b64decode(self._ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"])

    def _ask(self, method: str, **params: Any) -> Any:
        self._numbers += 1
        message: dict[str, Any] = {"id": self._numbers, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._send.write(json.dumps(message).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._numbers:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self._note(found)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._part:
            data = self._receive.read(1 << 16)
            assert data, "Chromium has ended"
            self._part += data
        one, _, self._part = self._part.partition(b"\0")
        found: dict[str, Any] = json.loads(one)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.said.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.said.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.said.append(json.dumps(params["entry"]))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Ends with the block. There must be a BINARY."""
    assert BINARY is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(prefix="lz-chromium-", ignore_cleanup_errors=True) as profile:
        command = [
            BINARY,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        command += ["--disable-background-networking", "--disable-component-update", "--disable-extensions"]
        command += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        shell = [sys.executable, "-c", MOVE, str(theirs_in), str(theirs_out), *command]
        process = subprocess.Popen(
            shell,
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        made: Browser | None = None
        try:
            made = Browser(ours_out, ours_in)
            yield made
        finally:
            if made is not None:
                made.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
