"""Debian's Chromium without a window, driven over a pipe: open an address, run JavaScript, click, see what it logs."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deadlines import within

CHROMIUM = shutil.which("chromium")
WAIT_S = within(30)
KEY_CODES = {"Escape": 27}
"""Of keys whose meaning is the browser's own."""
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """One page. Commands are those of the DevTools protocol."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._ids = to_browser, from_browser, itertools.count(1)
        self._received = b""
        self._session: str | None = None
        self.problems: list[str] = []
        """What the page logged as an error, threw or could not load."""
        self.requested: list[str] = []
        """Addresses that were asked for."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            assert select.select([self._from], [], [], WAIT_S)[0], "the browser does not answer"
            self._received += os.read(self._from, 1 << 20)
        message, _, self._received = self._received.partition(b"\0")
        event = json.loads(message)
        self._note(event.get("method", ""), event.get("params", {}))
        return dict(event)

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "assert"):
            self.problems.append(json.dumps(event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] == "error":
            self.problems.append(event["entry"]["text"] + " " + event["entry"].get("url", ""))
        elif method == "Network.requestWillBeSent":
            self.requested.append(event["request"]["url"])

    def run(self, script: str) -> Any:
        """The value of an expression; of a promise, what it resolves to."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, address: str) -> None:
        self.send("Page.navigate", url=address)

    def wait(self, script: str) -> Any:
        """Waits until the expression is true, and returns its value."""
        deadline = time.monotonic() + WAIT_S
        while True:
            if value := self.run(script):
                return value
            assert time.monotonic() < deadline, (script, self.text(), self.problems)
            time.sleep(0.05)

    def text(self) -> str:
        return str(self.run("document.body.innerText"))

    def press(self, key: str) -> None:
        text, code = (key, 0) if len(key) == 1 else ("", KEY_CODES.get(key, 0))
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, windowsVirtualKeyCode=code)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator[Browser]:
    assert CHROMIUM is not None
    # Chromium reads commands from descriptor 3 and answers on 4.
    (read_in, write_in), (read_out, write_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        shell = ["bash", "-c", f'exec "$@" 3<&{read_in} 4>&{write_out}', "bash", *command]
        process = subprocess.Popen(shell, pass_fds=(read_in, write_out), stderr=subprocess.DEVNULL)
        os.close(read_in)
        os.close(write_out)
        try:
            page = Browser(write_in, read_out)
            page.resize(width, height)
            yield page
        finally:
            process.terminate()
            process.wait(within(10))
            os.close(write_in)
            os.close(read_out)
