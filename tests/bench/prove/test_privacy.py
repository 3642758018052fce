"""Texts of a report tell nothing of whose machine it is."""

from __future__ import annotations

import getpass
import socket
import tempfile
from pathlib import Path

import pytest

from mlxcache.bench.prove.machine import describe_machine
from mlxcache.bench.prove.privacy import private_names, scrub


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("in /Users/ann/models/x: bad", "in .../x: bad"),
        ('File "/home/ann/.venv/lib/a.py", line 3', 'File ".../a.py", line 3'),
        ("C:\\Users\\ann\\model", ".../model"),
        ("~/secret/model", ".../model"),
        ("ann's host.local, Annex", "...'s ..., Annex"),
        ("50 tokens/s and 1/2, mlx_lm.server", "50 tokens/s and 1/2, mlx_lm.server"),
    ],
)
def test_folders_and_names_are_cut(text: str, scrubbed: str) -> None:
    """Whole words only, in any case; what looks like a path and is none stays."""
    assert scrub(text, ["host.local", "ann"]) == scrubbed


def test_the_names_are_this_users_and_this_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the domain, the longest first; `root` tells nothing."""
    monkeypatch.setattr(socket, "gethostname", lambda: "anns-mac.local")
    monkeypatch.setattr(getpass, "getuser", lambda: "ann")
    assert private_names() == ["anns-mac.local", "anns-mac", "ann"]
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    assert private_names() == ["anns-mac.local", "anns-mac"]


def test_the_machine_is_described_without_its_names() -> None:
    """Chip, memory, system and versions, and no folder."""
    found = describe_machine()
    assert found["memory_bytes"] > 1e9
    assert {"mlx", "mlx-lm"} <= found["versions"].keys()
    assert found["device_info"]
    text = str(found)
    for private in (*private_names(), str(Path.home()), tempfile.gettempdir() + "/"):
        assert private not in text or private == "/"
