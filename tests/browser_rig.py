"""A headless Chromium of its own for a test, spoken to over a pipe, with everything it asked for and complained of."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="needs chromium (Debian: apt-get install chromium)")


class Browser:
    """One tab. `errors`, `requests`: what went wrong and what was asked for since the last `open`."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        commands_out, commands = os.pipe()
        answers, answers_in = os.pipe()
        # the browser reads commands from descriptor 3 and writes answers to 4
        moved = ["bash", "-c", 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"', str(commands_out), str(answers_in), PROGRAM]
        self._process = subprocess.Popen(
            [*moved, *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(commands_out, answers_in),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands_out)
        os.close(answers_in)
        self._commands, self._answers = commands, answers
        self._read = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """One command of the DevTools protocol, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser is gone"
            self._read += more
        first, _, self._read = self._read.partition(b"\0")
        answer: dict[str, Any] = json.loads(first)
        match answer.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(answer["params"]["exceptionDetails"])[:2000])
            case "Runtime.consoleAPICalled":
                self.errors.append(json.dumps(answer["params"]["args"])[:2000])
            case "Log.entryAdded":
                self.errors.append(answer["params"]["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(answer["params"]["request"]["url"])
        return answer

    def open(self, page: Path, *, width: int = 1280, height: int = 900, theme: str = "light") -> None:
        """Load a file and wait until its scripts have run."""
        self.errors.clear()
        self.requests.clear()
        self.size(width, height)
        self.theme(theme)
        self.call("Page.navigate", url=page.resolve().as_uri())
        self.until("document.readyState === 'complete'")
        self.settle()

    def size(self, width: int, height: int = 900) -> None:
        """Size of the window."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def theme(self, theme: str, media: str = "") -> None:
        """What the reader's system asks for."""
        self.call(
            "Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": theme}]
        )

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, timeout_s: float = 30) -> None:
        """Wait for an expression to be true."""
        end = time.monotonic() + timeout_s
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)

    def settle(self) -> None:
        """Wait for two frames."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def move(self, x: float, y: float) -> None:
        """Move the mouse there, in two steps as a hand does."""
        for shift in (3, 0):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + shift, y=y)
        self.settle()

    def key(self, key: str) -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            code = {"Tab": 9, "Enter": 13}.get(key, 0)
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def picture(self, path: Path | None = None, *, whole: bool = True) -> bytes:
        """The page as PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        data = base64.b64decode(found["data"])
        if path is not None:
            path.write_bytes(data)
        return data

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def close(self) -> None:
        """End the browser and wait for it."""
        os.close(self._commands)
        os.close(self._answers)
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
