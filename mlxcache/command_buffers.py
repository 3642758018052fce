"""Size of the command buffers in which MLX gives work to Metal.

MLX commits a buffer after 20 to 50 operations or 40 to 50 MB of arrays, and one token of a large
model takes many. With larger buffers, models of many small operations decoded 5 to 8% faster on an
M3 Ultra and up to 50% faster on an M1 Ultra, while an M5 Max gained nothing.

Source: https://github.com/ml-explore/mlx/issues/4521,
https://github.com/vllm-project/vllm-metal/pull/637, https://github.com/lablup/mlxcel/pull/360
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Mapping

LARGE: Mapping[str, str] = {"MLX_MAX_OPS_PER_BUFFER": "1000", "MLX_MAX_MB_PER_BUFFER": "400"}

OWN: Mapping[str, str] = dict.fromkeys(LARGE, "")

_CHIPS = re.compile(r"\bApple M[1-4]\b")


def buffer_variables(chip: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `LARGE` for a chip; those in `environ` win, also empty ones."""
    usual = LARGE if _CHIPS.search(chip) else OWN
    found = {name: environ.get(name, usual[name]) for name in LARGE}
    return {name: value for name, value in found.items() if value}


def set_command_buffers() -> None:
    """Give MLX the variables, on a Mac, before it is first imported; not `os.environ`."""
    if sys.platform != "darwin":
        return
    wanted = buffer_variables(read_chip(), os.environ)
    for name in LARGE:
        if name in wanted:
            os.putenv(name, wanted[name])
        else:
            os.unsetenv(name)


def read_chip() -> str:
    name, size = ctypes.create_string_buffer(128), ctypes.c_size_t(128)
    try:
        failed = ctypes.CDLL(None).sysctlbyname(
            b"machdep.cpu.brand_string", name, ctypes.byref(size), None, ctypes.c_size_t(0)
        )
    except (OSError, AttributeError):
        return ""
    return "" if failed else name.value.decode()
