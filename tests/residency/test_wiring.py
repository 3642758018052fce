"""What is wired of a Mac's memory, and what the start says of it, with a stand-in for Metal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxcache.config import Settings
from mlxcache.residency import memory

GB = 10**9


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[int]:
    """The limits that MLX is given on a Mac with 64 GB, of which Metal may use 48."""
    found: list[int] = []
    metal = {"max_recommended_working_set_size": 48 * GB}
    monkeypatch.setattr(mx, "device_info", lambda *_: metal)
    monkeypatch.setattr(mx, "set_wired_limit", found.append)
    monkeypatch.setattr(memory, "machine_bytes", lambda: 64 * GB)
    caplog.set_level("INFO", "mlxcache")
    return found


@pytest.mark.parametrize(
    ("setting", "needed", "wired", "said"),
    [
        ("auto", 42, 0, "22 GB left to the system; 0 bytes wired: --wire auto wires only above"),
        ("auto", 43, 43, "43 GB of 64 GB for weights and cache, 21 GB left"),
        ("auto", 60, 48, "4 GB left to the system; 48 GB wired"),
        ("off", 60, 0, "0 bytes wired: --wire off"),
        ("8GB", 10, 8, "8 GB wired: --wire 8GB"),
        ("25%", 10, 16, "16 GB wired: --wire 25%"),
        ("60GB", 10, 48, "--wire 60GB limited to 48 GB"),
    ],
)
def test_memory_is_wired_as_the_setting_says(
    *,
    setting: str,
    needed: int,
    wired: int,
    said: str,
    limits: list[int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By itself only above two thirds of the memory, and never more than Metal may use."""
    memory.wire(Settings(wire=setting, cache_dir=tmp_path), needed * GB)
    assert limits == [wired * GB]
    assert said in caplog.text
    warned = [one for one in caplog.records if one.levelname == "WARNING"]
    assert len(warned) == ("limited" in said)


def test_without_metal_nothing_is_wired(
    limits: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor is MLX asked to; the start still says what is left."""
    empty: dict[str, Any] = {}
    monkeypatch.setattr(mx, "device_info", lambda *_: empty)
    memory.wire(Settings(cache_dir=tmp_path), 60 * GB)
    assert limits == []
    assert "4 GB left to the system; 0 bytes wired: only Metal can" in caplog.text
