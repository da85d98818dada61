"""A headless Chromium, driven by the DevTools protocol over two pipes.

A message is a JSON object and a zero byte; pipes need neither a port nor a websocket library."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_S = 60.0  # for an answer of the browser, which starts slowly on a busy machine
FLAGS = """
--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run
--disable-background-networking --disable-component-update --disable-extensions --disable-sync
--mute-audio --hide-scrollbars --force-color-profile=srgb --remote-debugging-pipe
""".split()  # noqa: SIM905  # words
KEYS = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "Tab": 9}


def found_browser() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class BrowserError(Exception):
    """An error thrown by the page or the browser, or a condition that never became true."""


class Browser:
    """One browser process with one page; a context manager."""

    def __init__(self, folder: Path) -> None:
        path = found_browser()
        assert path is not None
        # The browser reads from descriptor 3 and writes to 4: its pipe ends are moved there.
        reading, self._write_end = os.pipe()
        self._read_end, writing = os.pipe()
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (reading, writing)]

        def place_pipes() -> None:
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self._log = (folder / "chromium.log").open("w")
        self._process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(3, 4),
            preexec_fn=place_pipes,
        )
        for end in (reading, writing, *theirs):
            os.close(end)
        self._last_id, self._buffer, self.said = 0, b"", list[str]()
        self._session: str | None = None
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()
        for end in (self._write_end, self._read_end):
            os.close(end)

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def reload(self) -> None:
        self.run("window.beforeReload = true")
        self.call("Page.reload")
        self.until("!window.beforeReload && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def until(self, condition: str, seconds: float = PATIENCE_S) -> Any:
        """Waits for an expression to be true, and returns its value."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                value = self.run(condition)
            except BrowserError as error:  # a page that is being replaced has no context
                value = None
                if "context" not in str(error).lower():
                    raise
            if value:
                return value
            if time.monotonic() > deadline:
                raise BrowserError(f"never came true in {seconds:.0f} s: {condition}")
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        about = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        about["modifiers"] = 8 if shift else 0
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def click(self, selector: str) -> None:
        """A mouse click in the middle of an element."""
        place = self.until(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            "if (!found) return null; found.scrollIntoView({block: 'nearest'});"
            "const box = found.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        x, y = place
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def resize(
        self, width: int, height: int, *, scale: float = 1.0, is_phone: bool = False
    ) -> None:
        given = {"deviceScaleFactor": scale, "mobile": is_phone}
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, **given)

    def prefer(self, **features: str) -> None:
        """Sets media features, for example `prefers_color_scheme="dark"`."""
        pairs = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.call("Emulation.setEmulatedMedia", features=pairs)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._last_id:
                break
            self._hear(answer)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _attach(self) -> None:
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def _hear(self, event: dict[str, Any]) -> None:
        """Keeps the page's uncaught exceptions, calls of console.error and failed console.assert,
        and errors of the browser's log."""
        method, about = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.said.append(json.dumps(about["exceptionDetails"])[:1000])
        if method == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
            self.said.append(json.dumps(about["args"])[:1000])
        if method == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.said.append(about["entry"]["text"] + " " + about["entry"].get("url", ""))

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._read_end], [], [], left)[0]:
                raise BrowserError(f"the browser said nothing for {PATIENCE_S:.0f} s")
            piece = os.read(self._read_end, 1 << 16)
            if not piece:
                raise BrowserError(f"the browser ended; see {self._log.name}")
            self._buffer += piece
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)
