"""Take the pictures of the dashboard and of `mlxcache top`, for the README and the pages.

    bin/dashboard-picture [FOLDER]

Runs a server with the built-in demo model, sends it the requests of several agents, runs `top`, and
opens the dashboard in Chromium. With FOLDER, also writes pictures of the whole page there, 1280 and
360 pixels wide, light and dark.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from typer.testing import CliRunner

from bin._terminal_pictures import to_svg
from mlxcache.cli.main import app
from tests.served import Served, served
from tests.server.browser import Browser, browsing

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "dashboard.png"
TOP = PICTURE.with_name("top.svg")
FOUND = "return Boolean(document.querySelector(args[0]));"
FONT = "document.documentElement.style.setProperty('--sans', 'Inter, sans-serif');"
"""Script that sets the font Inter, which looks like the Mac's own font."""

TOOLS = ("Bash", "Edit", "Glob", "Grep", "Read", "Write", "Task", "WebFetch", "Notebook", "Todo")
RULES = (
    "Reads before it writes, and says which lines it changed.",
    "Takes an absolute path; a relative one is an error that names its folder.",
    "Returns at most two thousand lines, each cut at two thousand characters.",
    "Never runs what it was not asked to run, and never pushes.",
    "A result that is too long is kept in a file whose name is told.",
)
FLAKE = "The login test fails one time in five. Find out why."
UPLOAD = "Add retries with backoff to the upload client."
CONFIG = "Which modules still import the old config?"
NOTES = "Write the release notes for 2.4 from the merged pull requests."
REVIEW = "Review the change to the session store."
TYPES = "Add types to the parser."
CHAT = "Explain how a prefix tree shares what two prompts begin with."


def head(name: str, copies: int) -> str:
    """Return a long system prompt such as agents have. `copies` sets its length."""
    lines = [f"You are {name}, a coding agent. You work in the user's repository."]
    for copy in range(copies):
        for tool in TOOLS:
            lines.append(f"## {tool}, case {copy + 1}")
            lines += [f"{tool}: {rule}" for rule in RULES]
    return "\n".join(lines)


class Talk:
    """Conversation of one client with a server."""

    def __init__(self, url: str, client: str, session: str, system: str):
        self._http = httpx.Client(base_url=url, timeout=600)
        self._headers = {"User-Agent": client, "X-Session-Id": session}
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}]

    def to(self, url: str) -> None:
        """Continue the conversation with a server at another address."""
        self._http = httpx.Client(base_url=url, timeout=600)

    def ask(self, text: str, tokens: int = 40) -> None:
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages, "max_tokens": tokens, "temperature": 0}
        answer = self._http.post("/v1/chat/completions", json=body, headers=self._headers)
        answer.raise_for_status()
        reply = answer.json()["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": reply})

    def start(self, text: str, tokens: int) -> threading.Thread:
        """Send a request in a thread that discards the reply; return the thread."""
        messages = [*self.messages, {"role": "user", "content": text}]
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": True}
        body["logit_bias"] = {"0": -100, "1": -100, "2": -100}

        def read() -> None:
            try:
                with self._http.stream(
                    "POST", "/v1/chat/completions", json=body, headers=self._headers
                ) as answer:
                    for _ in answer.iter_bytes():
                        pass
            except httpx.HTTPError:
                return  # the server has been stopped

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread


def result(path: str, lines: int) -> str:
    """Return text that looks like the result of a search tool, with `lines` lines."""
    rows = (f"{path}:{7 * i + 3}: value = settings.get('key_{i}')" for i in range(lines))
    return "Result of Grep:\n" + "\n".join(rows)


def morning(url: str) -> list[Talk]:
    """Send the requests that the picture shows as older than a restart of the server.

    Returns the conversations to continue after the restart.
    """
    agent = head("Claude Code", 4)
    flake = Talk(url, "claude-cli/2.1.329", "7f3a", agent)
    upload = Talk(url, "claude-cli/2.1.329", "b81c", agent)
    flake.ask(FLAKE)
    upload.ask(UPLOAD)
    flake.ask(result("tests/test_login.py", 30))
    review = Talk(url, "zed/0.210", "a90c", head("Zed's assistant", 2))
    review.ask(REVIEW)
    return [flake, upload, review]


def afternoon(url: str, talks: list[Talk]) -> None:
    """Send the requests that follow the restart, some in the conversations `talks`."""
    flake, upload, review = talks
    for talk in talks:
        talk.to(url)
    flake.ask(result("app/session.py", 60))
    codex = head("Codex", 2)
    notes = Talk(url, "codex_cli_rs/0.98", "d2e9", codex + "\nOpen files: CHANGELOG.md")
    notes.ask(NOTES)
    upload.ask(result("client/upload.py", 40))
    notes.ask("Shorter, please.")
    flake.ask("Write the test that shows it.")
    chat = Talk(url, "Open-WebUI/0.6", "e7aa", "You are a patient teacher.")
    chat.ask(CHAT)
    notes.ask("And name the people.")
    notes.messages[0]["content"] = codex + "\nOpen files: CHANGELOG.md, docs/index.md"
    notes.ask("Put the breaking change first.")
    config = Talk(url, "claude-cli/2.1.329", "c055", head("Claude Code", 4))
    config.ask(CONFIG)
    config.ask(result("app/legacy.py", 50))
    upload.ask("Cap the wait at thirty seconds.")
    config.messages[3]["content"] = result("app/legacy_settings.py", 50)
    config.ask("And which of them are dead?")
    chat.ask("And when they part?")
    review.ask("Is the lock needed at all?")
    Talk(url, "aider/0.88", "5d11", head("Aider", 1)).ask(TYPES)
    http = httpx.Client(base_url=url, timeout=60)
    for one in http.get("/v1/sessions").json()["data"]:
        if one["label"] == "7f3a":
            http.patch(f"/v1/sessions/{one['id']}", json={"pinned": True})
            body = {"name": "Flaky login, second idea", "at_tokens": one["tokens"] - 900}
            http.post(f"/v1/sessions/{one['id']}/fork", json=body)
    flake.ask("Open the pull request.")


@contextmanager
def scene(home: Path) -> Iterator[Served]:
    """Run a server that has received all requests of the picture, with one restart."""
    flags = (
        "--ram",
        "640MB",
        "--disk",
        "4GB",
        "--no-anticipate",
        "--cache-dir",
        str(home / "cache"),
    )
    with served(*flags, home=home) as server:
        talks = morning(server.url)
        time.sleep(2)  # for the disk
        server.stop()
    with served(*flags, home=home) as server:
        afternoon(server.url, talks)
        yield server


def shown(browser: Browser, *selectors: str) -> None:
    """Wait until the page has an element for each of the CSS `selectors`."""
    wanted = list(selectors)
    while wanted:
        wanted = [one for one in wanted if not browser.run(FOUND, one)]
        time.sleep(0.1)


def take(browser: Browser, folder: Path | None) -> None:
    """Save the picture and, with `folder`, the pictures of the whole page."""
    browser.look(width=1280, height=1450)
    time.sleep(2)
    PICTURE.parent.mkdir(exist_ok=True)
    Image.open(BytesIO(browser.picture())).quantize(256).save(PICTURE, optimize=True)
    for width in (1280, 360) if folder else ():
        for scheme in ("light", "dark"):
            browser.look(width=width, scheme=scheme)
            time.sleep(1)
            height = browser.run("return document.documentElement.scrollHeight;")
            browser.look(width=width, height=height, scheme=scheme)
            time.sleep(1)
            assert folder is not None
            (folder / f"{width}-{scheme}.png").write_bytes(browser.picture())


def draw_top(url: str) -> None:
    """Draw the output of `mlxcache top --once` for the server at `url`, as an SVG file."""
    env = {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "104", "NO_COLOR": ""}
    done = CliRunner().invoke(app, ["top", "--once", "--url", url], env=env, color=True)
    assert done.exit_code == 0, done.output
    picture = to_svg(
        done.stdout.replace(url, "http://127.0.0.1:8081"),
        "mlxcache top",
        "Bars of the memory and of the disk budget, a table of the running requests with their "
        "progress, one of recent requests with the tokens from RAM, from disk and fed, and one of "
        "the sessions with their sizes.",
    )
    TOP.write_text(picture, encoding="utf-8")


def main(folder: Path | None) -> None:
    home = Path(tempfile.mkdtemp())
    with scene(home) as server, browsing(home) as browser:
        print(server.url, flush=True)
        agent = Talk(server.url, "opencode/1.2.6", "f00d", head("OpenCode", 2))
        agent.start("Find every place that reads the clock.", 9000)
        browser.open(f"{server.url}/dashboard")
        shown(browser, "#running li[data-phase=decode]", "#session-rows tr", ".node .ram")
        large = head("Codex in a large repository", 40)
        Talk(server.url, "codex_cli_rs/0.98", "d2ea", large).start("What evicts the cache?", 10)
        shown(browser, "#running li[data-phase=prefill] [aria-valuenow]:not([aria-valuenow='0'])")
        draw_top(server.url)
        browser.run(FONT)
        browser.tool("Emulation.setScrollbarsHidden", hidden=True)
        take(browser, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None)
