"""Sizes as users write them, and the limits of --ram and --disk."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcache.config import (
    disk_limit,
    explain_auto,
    format_size,
    load_settings,
    machine_bytes,
    memory_for,
    parse_size,
    ram_limit,
)
from mlxcache.config.sizes import MIN_RAM, read_size
from mlxcache.errors import ConfigError

GB = 10**9


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MB", 512_000_000),
        ("8GB", 8 * GB),
        ("8 gb", 8 * GB),
        ("8G", 8 * GB),
        ("16GiB", 16 * 2**30),
        ("1.5kib", 1536),
        ("2TB", 2 * 10**12),
        ("1500000", 1_500_000),
        ("77B", 77),
        (4096, 4096),
        ("25%", 16 * GB),
        ("12.5%", 8 * GB),
        ("100%", 64 * GB),
        ("auto", None),
        ("AUTO", None),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_size(text, total=64 * GB) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "0", "0GB", "0%", "101%", "8 parsecs", "8GBB", "1e9", 0, -5, True]
)
def test_an_invalid_size_is_refused(text):
    with pytest.raises(ConfigError) as raised:
        parse_size(text, total=GB)
    assert repr(text) in str(raised.value)


@given(st.integers(1, 10**15))
def test_format_and_parse_agree(size):
    shown = format_size(size).replace(" bytes", "B")
    again = parse_size(shown, total=1)
    assert again == pytest.approx(size, rel=0.051)


def test_a_number_whose_unit_was_forgotten_is_refused():
    """With the unit that was probably meant; 5 bytes would end in an error far from here."""
    with pytest.raises(ConfigError, match="'5' is a size of 5 bytes: did you mean 5GB"):
        read_size("5")
    assert read_size("1000000") == 10**6
    with pytest.raises(ConfigError, match=r"--ram: '5' .* did you mean 5GB\? \(at least 8MB"):
        load_settings({"ram": "5"}, {})


@pytest.mark.parametrize(
    ("setting", "machine", "working_set", "weights", "limit"),
    [
        ("auto", 64 * GB, 48 * GB, 20 * GB, 21 * GB),  # three quarters of what the weights leave
        ("auto", 16 * GB, None, 4 * GB, 6 * GB),  # half of it, without Metal
        ("auto", 16 * GB, None, 20 * GB, MIN_RAM),
        ("auto", 16 * GB, 16 * GB, 20 * GB, MIN_RAM),
        ("200MB", 16 * GB, 12 * GB, 10 * GB, 200_000_000),
        ("25%", 16 * GB, 12 * GB, 10 * GB, 4 * GB),
        (123, 16 * GB, 12 * GB, 10 * GB, 123),
    ],
)
def test_the_limit_of_ram(setting, machine, working_set, weights, limit):
    found = ram_limit(
        setting, machine_bytes=machine, working_set_bytes=working_set, weights_bytes=weights
    )
    assert found == limit


@pytest.mark.parametrize(
    ("machine", "most"), [(8, 4), (16, 12), (32, 28), (64, 56), (96, 84), (512, 496)]
)
def test_a_raised_working_set_still_leaves_memory_to_the_system(machine, most):
    """An eighth, from 4 to 16 GB; weights and budget of auto are never more than the rest."""
    sizes = {"machine_bytes": machine * GB, "working_set_bytes": machine * GB}
    assert memory_for(*sizes.values()) == most * GB
    for weights in (0, most * GB // 2, (most - 1) * GB):
        assert weights + ram_limit("auto", **sizes, weights_bytes=weights) <= most * GB
    assert memory_for(machine * GB, GB) == GB


@pytest.fixture
def disk(monkeypatch):
    """A disk of 1 TB with 100 GB free."""
    usage = SimpleNamespace(total=1000 * GB, free=100 * GB)
    monkeypatch.setattr("mlxcache.config.sizes.shutil.disk_usage", lambda path: usage)
    return usage


def test_a_disk_limit_is_a_size_a_percentage_or_off(disk, tmp_path):
    folder = tmp_path / "not" / "there"
    assert disk_limit("50GB", folder) == 50 * GB
    assert disk_limit("10%", folder) == 100 * GB
    assert disk_limit("off", folder) == 0
    with pytest.raises(ConfigError, match="1KB is too small"):
        disk_limit("1KB", folder)


def test_auto_on_a_disk_is_a_quarter_of_what_is_free(disk, tmp_path):
    assert disk_limit("auto", tmp_path) == 25 * GB
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_bytes(bytes(1_000_000))
    taken = (tmp_path / "sub" / "file").stat().st_blocks * 512
    disk.free -= taken
    assert disk_limit("auto", tmp_path) == 25 * GB
    disk.free = 900 * GB
    assert disk_limit("auto", tmp_path) == 200 * GB


def test_a_container_limit_lowers_the_machines_memory(monkeypatch):
    monkeypatch.setattr("mlxcache.config.sizes.memory_limit", lambda: None)
    assert machine_bytes() > 10**8
    monkeypatch.setattr("mlxcache.config.sizes.memory_limit", lambda: 10**8)
    assert machine_bytes() == 10**8


@pytest.mark.parametrize(("working_set", "said"), [(None, "half"), (12 * GB, "three quarters")])
def test_auto_is_explained_with_its_figures(working_set, said):
    whole = memory_for(16 * GB, working_set)
    text = explain_auto(whole, 4 * GB, metal=working_set is not None)
    assert said in text
    assert "4 GB" in text
    assert ("12 GB" if working_set else "16 GB") in text
    assert "what the weights" not in explain_auto(whole, 0, metal=working_set is not None)
