"""Metal's command buffers are large on the chips that gain from it, unless the user objects."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mlxcache.command_buffers import LARGE, buffer_variables

OPS, MB = LARGE


@pytest.mark.parametrize(
    ("chip", "large"),
    [
        ("Apple M1", True),
        ("Apple M3 Ultra", True),
        ("Apple M4 Max", True),
        ("Apple M5 Max", False),
        ("Apple M10", False),
        ("Apple M1 (Virtual)", True),
        ("AMD EPYC", False),
        ("", False),
    ],
)
def test_buffers_are_large_on_the_chips_that_gain_from_it(chip: str, large: bool) -> None:
    assert buffer_variables(chip, {}) == (LARGE if large else {})


def test_the_users_own_values_win() -> None:
    """One by one, on every chip; an empty one keeps MLX's own size."""
    assert buffer_variables("Apple M3", {OPS: "7"}) == {**LARGE, OPS: "7"}
    assert buffer_variables("Apple M3", {MB: ""}) == {OPS: LARGE[OPS]}
    assert buffer_variables("Apple M5", {OPS: "7"}) == {OPS: "7"}


IMPORTING = """
import ctypes, os, subprocess, sys

class Kernel:
    def sysctlbyname(self, name, text, *_):
        assert name == b"machdep.cpu.brand_string"
        text.value = b"Apple M3 Pro"
        return 0

before = dict(os.environ)
sys.platform, ctypes.CDLL = "darwin", lambda _: Kernel()
import mlxcache

assert "mlx.core" not in sys.modules
assert before == dict(os.environ)
subprocess.run(["env"], check=True)
"""


@pytest.mark.parametrize("own", [{}, {OPS: "7", MB: ""}])
def test_any_import_of_the_package_sets_them_before_mlx_is_imported(own: dict[str, str]) -> None:
    """For MLX and for programs started without an environment; `os.environ` stays the user's."""
    environ = {name: value for name, value in os.environ.items() if name not in LARGE} | own
    command = [sys.executable, "-c", IMPORTING]
    lines = subprocess.check_output(command, env=environ, text=True, timeout=60).splitlines()
    found = dict(line.split("=", 1) for line in lines if line.startswith(tuple(LARGE)))
    assert found == (LARGE if not own else {OPS: "7"})
