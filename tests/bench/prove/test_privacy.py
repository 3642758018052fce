"""Texts of a report tell nothing of whose machine it is."""

from __future__ import annotations

import getpass
import socket
import tempfile
from pathlib import Path

import pytest

from mlxcache.bench.prove.machine import describe_machine, device_info
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


def test_what_is_unique_to_a_device_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's CUDA device has such fields."""
    import mlx.core as mx

    info = {"device_name": "GPU of /home/ann/x", "uuid": "GPU-1234", "pci_bus_id": "0000:01"}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert device_info() == {"device_name": "GPU of .../x"}


def test_the_machine_is_described_without_its_names() -> None:
    """Chip, memory, system and versions, and no folder."""
    found = describe_machine()
    assert found["memory_bytes"] > 1e9
    assert {"mlx", "mlx-lm"} <= found["versions"].keys()
    assert found["device_info"]
    text = str(found)
    for private in (*private_names(), str(Path.home()), tempfile.gettempdir() + "/"):
        assert private not in text or private == "/"
