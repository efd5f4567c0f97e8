"""A headless Chromium, driven over a pipe with its DevTools protocol: no driver, no package, no port."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio"),
    *("--remote-debugging-pipe", "--disable-background-networking", "--hide-scrollbars"),
)
LAUNCHER = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for place, pipe in enumerate(pipes, 3):
    os.dup2(pipe, place)
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""Puts the two pipes where Chromium looks for them, by way of numbers that neither of them has."""
PATIENCE = 60.0
"""Seconds to wait for an answer before giving up."""


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def open_browser(profile: Path) -> Iterator["Browser"]:
    """Chromium reads commands from file descriptor 3 and answers on 4."""
    (command_out, command_in), (answer_out, answer_in) = os.pipe(), os.pipe()
    command = [find_chromium() or "chromium", *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(command_out), str(answer_in), *command],
        pass_fds=(command_out, answer_in),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(command_out)
    os.close(answer_in)
    try:
        yield Browser(command_in, answer_out)
    finally:
        os.close(command_in)
        os.close(answer_out)
        process.terminate()
        process.wait(PATIENCE)


class Browser:
    """One page; whatever it complains about is collected in `complaints`."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer, self._number, self._session = b"", 0, None
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, page: Path) -> None:
        self.send("Page.navigate", url=page.as_uri())
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, script: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.evaluate(script):
            assert time.monotonic() < deadline, f"still false: {script}"
            time.sleep(0.02)

    def wait_for_tab(self, address: str) -> None:
        """Until a tab shows `address`; then close it."""
        deadline = time.monotonic() + PATIENCE
        while not (found := [t for t in self.send("Target.getTargets")["targetInfos"] if t["url"] == address]):
            assert time.monotonic() < deadline, f"no tab shows {address}"
            time.sleep(0.02)
        self.send("Target.closeTarget", targetId=found[0]["targetId"])

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the element."""
        x, y = self.middle_of(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def move_mouse(self, x: float, y: float, *, held: bool = False) -> None:
        button = {"button": "left", "buttons": 1} if held else {}
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, **button)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        self.move_mouse(*start)
        for kind, (x, y) in (("mousePressed", start), ("mouseReleased", end)):
            if kind == "mouseReleased":
                self.move_mouse((start[0] + x) / 2, y, held=True)
                self.move_mouse(x, y, held=True)
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def middle_of(self, selector: str) -> tuple[float, float]:
        script = f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: "center"}});
            const box = element.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()"""
        x, y = self.evaluate(script)
        return x, y

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        scale = 2 if phone else 1
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )

    def prefer(self, scheme: str) -> None:
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        data = self.send("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def print_to(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.printToPDF", printBackground=True)["data"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], PATIENCE)
            assert ready, "Chromium does not answer"
            piece = os.read(self._answers, 1 << 20)
            assert piece, "Chromium has gone"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, details = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {details['exceptionDetails']}")
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.complaints.append(f"console: {details['args']}")
        elif method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"log: {details['entry']}")
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {details['message']}")
        elif method == "Network.requestWillBeSent" and not details["request"]["url"].startswith(("file:", "data:")):
            self.complaints.append(f"request: {details['request']['url']}")
