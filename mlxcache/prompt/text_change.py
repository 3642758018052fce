"""The first place at which two texts differ, and what kind of value changed there."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from mlxcache.common_prefix import common_characters
from mlxcache.prompt.volatile import ANNOUNCED, VALUES, causes_touching

_LEFT, _RIGHT = 60, 140
"""Number of characters shown before and after the first difference."""
_CLOSE = 8
"""Number of equal characters at the start of the texts in `Change.shows`."""
_LINE = 400
"""Number of characters of a line examined before and after the first difference."""
_GIT = re.compile(r"gitStatus|[Gg]it status|Git snapshot at|^(?:Current|Git) branch:", re.MULTILINE)
_GIT_LINE = re.compile(
    r"(?:\w+: )?(?:[ MADRCTU?!]{1,2} \S|[0-9a-f]{7,40} |\(clean\)|Status:|Recent commits:"
    r"|(?:Current|Main|Git) branch)"
)
_GIT_REACH = 4000
"""Number of characters before a change that are searched for the heading of a git status."""
_NUMBER = re.compile(r"\d[\d,_]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Change:
    """The change of one text into another.

    `at`: number of shared leading characters. `cause`: kind of the change, such as `date`, or else
    `text`. `before`, `after`: excerpts of the old and new text, beginning with up to 60 shared
    characters of the same line.
    `shows`: the old and the new text from up to 8 characters before `at` to 140 after it.
    """

    at: int
    cause: str
    before: str
    after: str
    shows: tuple[str, str]


def change_of(old: str, new: str, *, machine: bool = False) -> Change:
    """Return the change of `old` into a different text `new`.

    `machine`: a program wrote the texts. A changed number that is no date, path or other value of
    a known kind then has the cause `counter`; else its cause is `text`.
    """
    at = common_characters(old, new)
    shown = slice(max(0, at - _CLOSE), at + _RIGHT)
    cause = _cause(old, new, at, machine)
    return Change(at, cause, excerpt(old, at), excerpt(new, at), (old[shown], new[shown]))


def excerpt(text: str, at: int) -> str:
    """Return up to 60 characters of the line before character `at`, and up to 140 from it on."""
    start = max(at - _LEFT, text.rfind("\n", 0, at) + 1)
    return text[start : at + _RIGHT]


def _cause(old: str, new: str, at: int, machine: bool) -> str:
    """Return the kind of the change at character `at`, such as `date`, or else `text`.

    `machine`: a program wrote the texts. A changed number that is no date, path or other value of
    a known kind then has the cause `counter`; else its cause is `text`.
    """
    was, begun = _line(old, at)
    now, _ = _line(new, at)
    (first, was_end), now_end = _span(was, now, at - begun), 0
    now_end = was_end + len(now) - len(was)
    either = causes_touching(ANNOUNCED, was, first, was_end)
    either += causes_touching(ANNOUNCED, now, first, now_end)
    if either:
        return either[0]
    if _in_git(old, at, was) or _in_git(new, at, now):
        return "git_status"
    values = causes_touching(VALUES, now, first, now_end)
    both = [cause for cause in causes_touching(VALUES, was, first, was_end) if cause in values]
    if both:
        return both[0]
    if machine and _number_at(was, first, was_end) and _number_at(now, first, now_end):
        return "counter"
    return invisible_form(was, now) or invisible_form(old, new) or "text"


def _line(text: str, at: int) -> tuple[str, int]:
    """Return the line of `text` that contains character `at`, and the offset of the line's start.

    Of a long line, only the part near `at` is returned, with the offset of that part.
    """
    start = max(at - _LINE, text.rfind("\n", 0, at) + 1)
    end = text.find("\n", at, at + _LINE)
    return text[start : end if end >= 0 else at + _LINE], start


def _span(was: str, now: str, first: int) -> tuple[int, int]:
    """Return the half-open range [start, end) of the changed characters of `was`.

    `first`: offset of the first changed character. The range ends where the common ending with
    `now` starts.
    """
    most = min(len(was), len(now)) - first
    same = next((i for i in range(most) if was[-1 - i] != now[-1 - i]), most)
    return first, len(was) - same


def _number_at(line: str, start: int, end: int) -> bool:
    """Return whether characters [start, end) of a line are part of one number."""
    return any(m.start() <= start and m.end() >= end for m in _NUMBER.finditer(line))


def _in_git(text: str, at: int, line: str) -> bool:
    """Return whether a line is part of a git status in the text.

    `line`: the line that contains character `at` of `text`.
    """
    if not _GIT_LINE.match(line):
        return False
    near = text[max(0, at - _GIT_REACH) : at + _LINE]
    return _GIT.search(near) is not None


def invisible_form(old: str, new: str) -> str | None:
    """Return the name of a difference between two texts that is invisible, such as `whitespace`.

    The others are `line_endings` and `unicode_normalisation`. Returns None if the texts are equal
    or differ visibly.
    """
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
