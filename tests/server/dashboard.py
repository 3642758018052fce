"""The dashboard in a browser, as a person uses it."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from tests.server.api import until
from tests.server.browser import Browser

SHOWN = """[...document.querySelectorAll(args[0])].some(
  e => e.checkVisibility() && e.textContent.includes(args[1]))"""


class Page:
    """The page at `url`, opened in `browser`; files that it saves go to `folder`."""

    def __init__(self, browser: Browser, url: str, folder: Path):
        self.browser, self.url, self.folder = browser, url, folder
        browser.tool("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))

    def open(self, key: str | None = None) -> None:
        """Load it anew; `key` is what a person typed in earlier."""
        if key is not None:
            self.browser.open(f"{self.url}/dashboard/icon.svg")
            self.run(f"sessionStorage.setItem('mlxcache.key', '{key}');")
        self.browser.open(f"{self.url}/dashboard")

    def run(self, script: str, *args: Any) -> Any:
        """What the script returns. Raises AssertionError where it throws."""
        found = self.browser.run(script, *args)
        assert not (isinstance(found, str) and found.startswith("failed: ")), found
        return found

    def text(self, selector: str) -> str:
        """The text of the first such element; "" if there is none."""
        return str(self.run("return document.querySelector(args[0])?.textContent ?? '';", selector))

    def texts(self, selector: str) -> list[str]:
        """The texts of all such elements that are shown."""
        script = "return [...document.querySelectorAll(args[0])].filter(e => e.checkVisibility())"
        return list(self.run(f"{script}.map(e => e.textContent);", selector))

    def until(self, condition: str, *args: Any, seconds: float = 90) -> Any:
        """Wait for what a script's expression gives, and return it."""
        found: list[Any] = []

        def there() -> bool:
            found[:] = [self.run(f"return {condition};", *args)]
            return bool(found[0])

        until(there, seconds, lambda: f"{condition} {args}: {self.text('body')[:2000]}")
        return found[0]

    def has(self, selector: str, words: str) -> None:
        """Wait until one of these elements shows the text."""
        self.until(SHOWN, selector, words)

    def lacks(self, selector: str, words: str) -> None:
        """Wait until none of these elements shows the text."""
        self.until(f"!({SHOWN})", selector, words)

    def click(self, selector: str) -> None:
        self.until("document.querySelector(args[0])", selector)
        self.run("document.querySelector(args[0]).click();", selector)

    def act(self, session: str, name: str) -> None:
        """Press the button of a session's row that has this name."""
        self.click(f'[data-id="{session}"] .acts button[title^="{name}"]')

    def write(self, selector: str, text: str) -> None:
        script = "const e = document.querySelector(args[0]); e.value = args[1];"
        self.run(f"{script} e.dispatchEvent(new Event('input'));", selector, text)

    def press(self, key: str, code: int, *, shift: bool = False) -> None:
        """A key of the keyboard, as the browser gets it from the system."""
        for kind in ("keyDown", "keyUp"):
            self.browser.tool(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key,
                windowsVirtualKeyCode=code, modifiers=8 if shift else 0,
                **({"text": "\r"} if key == "Enter" and kind == "keyDown" else {}),
            )  # fmt: skip

    def drop(self, file: Path) -> None:
        """Drop a file onto the page."""
        script = """
        const bytes = Uint8Array.from(atob(args[0]), c => c.charCodeAt(0));
        const data = new DataTransfer();
        data.items.add(new File([bytes], args[1]));
        for (const type of ['dragenter', 'dragover', 'drop'])
          document.body.dispatchEvent(
            new DragEvent(type, {dataTransfer: data, bubbles: true, cancelable: true}));
        """
        self.run(script, base64.b64encode(file.read_bytes()).decode(), file.name)
