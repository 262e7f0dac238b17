"""A headless Chromium and its tabs, spoken to in its own protocol over a pipe: nothing is installed for it.

Rules: one browser for all tests, a fresh context (no storage, no cache of others) for each tab; what a page says in its
console, throws, asks of the network and is refused by its policy is kept, so that a test can say there was none.
"""

import asyncio
import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from time import monotonic
from typing import Any

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
    "--no-first-run", "--no-default-browser-check", "--disable-background-networking", "--disable-component-update",
    "--disable-extensions", "--disable-sync", "--mute-audio", "--hide-scrollbars", "--force-color-profile=srgb",
)  # fmt: skip
BLANK = "about:blank"
ANSWER_S = 20.0
ONTO_3_AND_4 = """
import fcntl, os, sys
high = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, place in zip(high, (3, 4)):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads its commands from descriptor 3 and answers on 4."""
LISTENED = ("Runtime", "Log", "Network", "Page", "Performance")


def found() -> str | None:
    """The browser of this machine, if it has one."""
    named = (os.environ.get("EBBTIDE_CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((path for name in named if name and (path := shutil.which(name))), None)


class Browser:
    """The process. Close it."""

    def __init__(self, program: str) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="ebbtide-browser-")
        to_browser, self.sink = os.pipe()
        self.source, from_browser = os.pipe()
        ends = [str(to_browser), str(from_browser)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", ONTO_3_AND_4, *ends, program, *FLAGS, f"--user-data-dir={self._home.name}", BLANK],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)

    def close(self) -> None:
        """End it, and what it wrote."""
        os.close(self.sink)
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self.source)
        with suppress(OSError):
            self._home.cleanup()

    @asynccontextmanager
    async def tab(self, width: int = 1280, height: int = 900, **media: str) -> AsyncIterator["Tab"]:
        """A tab of its own, gone at the end of the block. `media` are features such as `prefers_color_scheme`."""
        line = await Line.open(self.source, self.sink)
        try:
            context = (await line.ask("Target.createBrowserContext"))["browserContextId"]
            target = await line.ask("Target.createTarget", url=BLANK, browserContextId=context)
            attached = await line.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
            tab = Tab(line, attached["sessionId"])
            await tab.begin(width, height, media)
            try:
                yield tab
            finally:
                await line.ask("Target.disposeBrowserContext", browserContextId=context)
        finally:
            await line.close()


class Line:
    """The pipe, for the length of one test: its loop is that test's."""

    def __init__(self, reader: asyncio.StreamReader, ends: tuple[Any, Any]) -> None:
        self._reader, self._ends = reader, ends
        self._number = 0
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.heard: Callable[[str, dict[str, Any]], None] = lambda method, told: None
        self._task = asyncio.create_task(self._listen(), name="fake-browser-line")

    @classmethod
    async def open(cls, source: int, sink: int) -> "Line":
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=64 * 2**20)
        coming, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(source), "rb", 0)
        )
        going, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(os.dup(sink), "wb", 0))
        return cls(reader, (coming, going))

    async def ask(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command, and what came of it."""
        self._number += 1
        future = self._asked[self._number] = asyncio.get_running_loop().create_future()
        told = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        self._ends[1].write(json.dumps(told).encode() + b"\0")
        return await asyncio.wait_for(future, ANSWER_S)

    async def close(self) -> None:
        self._task.cancel()
        for end in self._ends:
            end.close()
        await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.sleep(0)

    async def _listen(self) -> None:
        while True:
            raw = await self._reader.readuntil(b"\0")
            try:
                told = json.loads(raw[:-1])
            except ValueError:
                continue  # the rest of something said to an earlier test
            future = self._asked.pop(told.get("id", 0), None)
            if future is None:
                self.heard(told.get("method", ""), told.get("params", {}))
            elif not future.done():
                if "error" in told:
                    future.set_exception(AssertionError(f"the browser says: {told['error']}"))
                else:
                    future.set_result(told.get("result", {}))


class Tab:
    """One page. `said` is what its console and its policy complained of, `hosts` whom it asked."""

    def __init__(self, line: Line, session: str) -> None:
        self._line, self._session = line, session
        self.said: list[str] = []
        self.urls: list[str] = []
        line.heard = self._heard

    async def begin(self, width: int, height: int, media: dict[str, str]) -> None:
        for domain in LISTENED:
            await self.ask(f"{domain}.enable")
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in media.items()]
        await self.ask("Emulation.setEmulatedMedia", features=features)

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._line.ask(method, self._session, **params)

    async def open(self, url: str) -> None:
        told = await self.ask("Page.navigate", url=url)
        assert "errorText" not in told, told

    async def run(self, script: str) -> Any:
        """The value of an expression, awaited if it is a promise."""
        told = await self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise AssertionError(f"{script[:200]}: {told['exceptionDetails']}")
        return told["result"].get("value")

    async def until(self, script: str, within: float = 10.0) -> Any:
        """The first true value of an expression."""
        deadline = monotonic() + within
        while not (value := await self.run(f"(() => {{ try {{ return {script}; }} catch {{ return null; }} }})()")):
            if monotonic() > deadline:
                shown = await self.run("document.body.innerText.slice(0, 2000)")
                raise AssertionError(f"not within {within} s: {script}\nsaid: {self.said}\nshown:\n{shown}")
            await asyncio.sleep(0.05)
        return value

    async def text(self, selector: str) -> str:
        return str(await self.run(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))

    async def click(self, selector: str) -> None:
        await self.run(f"document.querySelector({json.dumps(selector)}).click()")

    async def type(self, text: str) -> None:
        await self.ask("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        code = {"Enter": 13, "Tab": 9, "Escape": 27}[key]
        for kind in ("rawKeyDown", "keyUp"):
            await self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    async def measures(self) -> dict[str, float]:
        """The browser's own counters: DOM nodes, layouts, seconds of script."""
        told = await self.ask("Performance.getMetrics")
        return {one["name"]: one["value"] for one in told["metrics"]}

    async def picture(self, *, whole: bool = False) -> bytes:
        """The page as a PNG."""
        shot = await self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def _heard(self, method: str, told: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                details = told["exceptionDetails"]
                self.said.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                self.said.append(str([one.get("value", one.get("description")) for one in told["args"]]))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                entry = told["entry"]
                self.said.append(f"{entry['text']} {entry.get('url', '')}")
            case "Network.requestWillBeSent":
                self.urls.append(told["request"]["url"])
