"""A real browser, driven over WebDriver (https://www.w3.org/TR/webdriver2/), and pages for it."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from tests.server.api import until

NAMES = (("chromium", "chromedriver"), ("google-chrome", "chromedriver"))
EVIL = "evil.example"
"""A public name that its owner has pointed at this machine."""


def installed() -> tuple[str, str] | None:
    """A browser and its driver, if there are both."""
    for name, driver in NAMES:
        found = (shutil.which(name), shutil.which(driver))
        if found[0] and found[1]:
            return found[0], found[1]
    return None


class Browser:
    def __init__(self, driver: str, capabilities: dict[str, Any]):
        self._http = httpx.Client(base_url=driver, timeout=120)
        made = self._post("/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._session = f"/session/{made['sessionId']}"
        self._post(f"{self._session}/timeouts", {"script": 90_000, "pageLoad": 60_000})

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._http.post(path, json=body).json()["value"]
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return answer

    def open(self, url: str) -> None:
        self._post(f"{self._session}/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """What `script`, the body of an async function, returns in the page that is open."""
        body = "const done = arguments[arguments.length - 1]; const args = [...arguments];"
        body += f"(async () => {{ {script} }})().then(done, e => done('failed: ' + e));"
        return self._post(f"{self._session}/execute/async", {"script": body, "args": list(args)})

    def tool(self, command: str, **params: Any) -> Any:
        """A command of the DevTools protocol: https://chromedevtools.github.io/devtools-protocol/."""
        return self._post(f"{self._session}/goog/cdp/execute", {"cmd": command, "params": params})

    def look(self, *, width: int, height: int = 900, scheme: str = "light", scale: int = 1) -> None:
        """Show the page in a window of this size, in the colours that the system prefers."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.tool("Emulation.setDeviceMetricsOverride", **metrics)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.tool("Emulation.setEmulatedMedia", features=features)

    def picture(self, *, whole: bool = False) -> bytes:
        """What the window shows, or all of the page, as a PNG."""
        shot = self.tool("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def logged(self, kind: str) -> list[dict[str, Any]]:
        """What was logged since the last call: `browser` is the console, `performance` the network.

        Only of a browser that was started with `logs`.
        """
        return list(self._post(f"{self._session}/se/log", {"type": kind}))

    def close(self) -> None:
        self._http.delete(self._session)


@contextmanager
def browsing(folder: Path, *, logs: bool = False) -> Iterator[Browser]:
    """A browser to which `EVIL` is this machine. `logs`: it keeps what `Browser.logged` tells."""
    found = installed()
    assert found is not None
    output = (folder / "driver.log").open("w+", encoding="utf-8")
    kept = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}  # it is for MLX
    driver = subprocess.Popen(
        [found[1], "--port=0"],
        stdout=output,
        stderr=subprocess.STDOUT,
        env=kept,
    )
    try:
        log = folder / "driver.log"
        said = "started successfully on port "
        until(lambda: said in log.read_text(), 60, log.read_text)
        port = log.read_text().rpartition(said)[2].split(".")[0]
        arguments = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            f"--user-data-dir={folder / 'profile'}",
            f"--host-resolver-rules=MAP {EVIL} 127.0.0.1",
        ]
        options = {"binary": found[0], "args": arguments}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options}
        if logs:
            wanted["goog:loggingPrefs"] = {"browser": "ALL", "performance": "ALL"}
        browser = Browser(f"http://127.0.0.1:{port}", wanted)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        driver.terminate()
        driver.wait(30)
        output.close()


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"<!doctype html><title>A page</title><body>"
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def pages() -> Iterator[int]:
    """A web site of empty pages, on a port of its own."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        try:
            yield site.server_address[1]
        finally:
            site.shutdown()
            thread.join(10)
