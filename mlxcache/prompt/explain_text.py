"""How one text became another: where they part, and what kind of change that is."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from mlxcache.common_prefix import common_characters
from mlxcache.prompt.audit_shapes import ANNOUNCED, VALUES, touching

_LEFT, _RIGHT = 60, 140
"""Characters of a text that are shown before and from where it parts."""
_CLOSE = 8
_LINE = 400
"""Characters of a line, each way from where it parts, that are looked at."""
_GIT = re.compile(r"gitStatus|[Gg]it status|^(?:Current|Git) branch:", re.MULTILINE)
_GIT_LINE = re.compile(
    r"(?:\w+: )?(?:[ MADRCTU?!]{1,2} \S|[0-9a-f]{7,40} |\(clean\)|Status:|Recent commits:"
    r"|(?:Current|Main|Git) branch)"
)
_GIT_REACH = 4000
_NUMBER = re.compile(r"\d[\d,_]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Change:
    """`at`: characters that both texts begin with; `before`, `after`: the old and new text there.

    Both begin with up to 60 characters that are the same, on the same line. `shows`: the two from
    a few characters before `at` on.
    """

    at: int
    cause: str
    before: str
    after: str
    shows: tuple[str, str]


def change_of(old: str, new: str, *, machine: bool = False) -> Change:
    """How `old` became `new`, which is not the same text.

    `machine`: a program wrote it, so that a number which changes is a counter.
    """
    at = common_characters(old, new)
    shown = slice(max(0, at - _CLOSE), at + _RIGHT)
    cause = _cause(old, new, at, machine)
    return Change(at, cause, excerpt(old, at), excerpt(new, at), (old[shown], new[shown]))


def excerpt(text: str, at: int) -> str:
    """What stands around a character, from the start of its line if that is near."""
    start = max(at - _LEFT, text.rfind("\n", 0, at) + 1)
    return text[start : at + _RIGHT]


def _cause(old: str, new: str, at: int, machine: bool) -> str:
    was, begun = _line(old, at)
    now, _ = _line(new, at)
    (first, was_end), now_end = _span(was, now, at - begun), 0
    now_end = was_end + len(now) - len(was)
    either = touching(ANNOUNCED, was, first, was_end) + touching(ANNOUNCED, now, first, now_end)
    if either:
        return either[0]
    if _in_git(old, at, was) or _in_git(new, at, now):
        return "git_status"
    values = touching(VALUES, now, first, now_end)
    both = [cause for cause in touching(VALUES, was, first, was_end) if cause in values]
    if both:
        return both[0]
    if machine and _number_at(was, first, was_end) and _number_at(now, first, now_end):
        return "counter"
    return form(was, now) or form(old, new) or "text"


def _line(text: str, at: int) -> tuple[str, int]:
    """The line that a character stands in, and where it begins; of a long one what is near."""
    start = max(at - _LINE, text.rfind("\n", 0, at) + 1)
    end = text.find("\n", at, at + _LINE)
    return text[start : end if end >= 0 else at + _LINE], start


def _span(was: str, now: str, first: int) -> tuple[int, int]:
    """The characters of `was` that changed: from `first` to where both end alike."""
    most = min(len(was), len(now)) - first
    same = next((i for i in range(most) if was[-1 - i] != now[-1 - i]), most)
    return first, len(was) - same


def _number_at(line: str, start: int, end: int) -> bool:
    return any(m.start() <= start and m.end() >= end for m in _NUMBER.finditer(line))


def _in_git(text: str, at: int, line: str) -> bool:
    """Whether a line is one of a git status that the text holds."""
    if not _GIT_LINE.match(line):
        return False
    near = text[max(0, at - _GIT_REACH) : at + _LINE]
    return _GIT.search(near) is not None


def form(old: str, new: str) -> str | None:
    """In what two texts differ that read the same; None where they do not, or are the same."""
    if old == new:
        return None
    if old.replace("\r\n", "\n").rstrip("\r") == new.replace("\r\n", "\n").rstrip("\r"):
        return "line_endings"
    if "".join(old.split()) == "".join(new.split()):
        return "whitespace"
    if unicodedata.normalize("NFC", old) == unicodedata.normalize("NFC", new):
        return "unicode_normalisation"
    if unicodedata.normalize("NFKC", old) == unicodedata.normalize("NFKC", new):
        return "unicode_normalisation"
    return None
