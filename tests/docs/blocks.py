"""The blocks of code in README and docs/, each with the comment that stands right above it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if not path.is_symlink()
)
DEFAULT_URL = "http://127.0.0.1:8081"
"""Where a server listens unless told: pages are written for it."""


def for_server(text: str, url: str) -> str:
    """A page's text for a server at `url`, also where it has the address alone."""
    return text.replace(DEFAULT_URL.split("//")[1], url.split("//")[1])


_NOTE = re.compile(r"<!-- (.+) -->")
_NOT_RUN = "not run: "


@dataclass(frozen=True)
class Block:
    """A fenced block of code. `note`: the comment in the line above it, or nothing."""

    page: str
    line: int
    language: str
    code: str
    note: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def reason(self) -> str | None:
        """Why it is not run; None: it is."""
        return self.note.removeprefix(_NOT_RUN) if self.note.startswith(_NOT_RUN) else None


def _blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    name = str(page.relative_to(ROOT))
    start = None
    for i, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = i
            continue
        above = _NOTE.fullmatch(lines[start - 1]) if start else None
        code = "\n".join(lines[start + 1 : i])
        found.append(Block(name, start + 1, lines[start][3:], code, above[1] if above else ""))
        start = None
    assert start is None, f"{name}:{(start or 0) + 1} has a block without an end"
    return found


BLOCKS = [block for page in PAGES for block in _blocks(page)]


def of(*languages: str) -> list[Block]:
    """All blocks in one of these languages."""
    return [block for block in BLOCKS if block.language in languages]
