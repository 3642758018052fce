"""Check a release against the changelog, and print the section of its notes.

`python bin/_release.py TAG [FILE ...]`: the tag is `v` and the version of the package, the first
section of CHANGELOG.md is that version's and has a date, and each FILE is a wheel or source archive
of it. Exit status 1 if not. Needs nothing but the standard library.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADING = re.compile(
    r"^## (?P<version>\S+) \((?P<date>\d{4}-\d\d-\d\d|unreleased)\)$", re.MULTILINE
)


class ReleaseError(Exception):
    """A release whose parts contradict each other. The text says which."""


def main(arguments: Sequence[str]) -> int:
    """Print the notes and return the exit status."""
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        print(check(arguments[0], arguments[1:]))
    except (ReleaseError, OSError) as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    return 0


def check(tag: str, files: Sequence[str] = (), root: Path = ROOT) -> str:
    """Return the notes of the release `tag` of the clone `root`. Raises ReleaseError."""
    version = read_version(root)
    if tag != f"v{version}":
        raise ReleaseError(f"the tag is {tag}, and mlxcache.__version__ is {version}")
    date, notes = first_section(root, version)
    if date == "unreleased":
        raise ReleaseError(f"CHANGELOG.md still says '{version} (unreleased)': write the date")
    for file in files:
        if not re.fullmatch(rf"mlxcache-{re.escape(version)}(-.+\.whl|\.tar\.gz)", Path(file).name):
            raise ReleaseError(f"{file} is not of version {version}")
    return notes


def read_version(root: Path = ROOT) -> str:
    """Return `mlxcache.__version__`, which is also the version of a wheel."""
    text = (root / "mlxcache" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise ReleaseError("mlxcache/__init__.py sets no __version__")
    return found[1]


def first_section(root: Path, version: str) -> tuple[str, str]:
    """Return the date and the text of the changelog's first section, which is that of `version`.

    The date is `unreleased` before the release. Raises ReleaseError.
    """
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = list(HEADING.finditer(text))
    headings = re.findall(r"^## .*$", text, re.MULTILINE)
    if len(sections) != len(headings) or not sections:
        raise ReleaseError("a heading of CHANGELOG.md is not '## VERSION (YYYY-MM-DD)'")
    first = sections[0]
    if first["version"] != version:
        raise ReleaseError(f"CHANGELOG.md begins with {first['version']}, not with {version}")
    end = sections[1].start() if len(sections) > 1 else len(text)
    notes = text[first.end() : end].strip()
    if not notes:
        raise ReleaseError(f"CHANGELOG.md says nothing about {version}")
    return first["date"], notes


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
