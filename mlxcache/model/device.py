"""The machine's accelerator: its limits, its errors, and MLX's memory settings.

A GPU runs commands after the call that encoded them has returned. Since MLX 0.32, a command that
fails on Metal does not raise where it was evaluated: its results keep the numbers that were in
memory, and MLX raises once, at a later evaluation or wait. So a result is *confirmed* only when a
wait after it has returned without an error; see `confirm`. MLX thread only.

Source: https://github.com/ml-explore/mlx/pull/3523, https://github.com/ml-explore/mlx/pull/4174
"""

from __future__ import annotations

import re
from typing import Literal

import mlx.core as mx

DeviceKind = Literal["cpu", "gpu"]

_DEVICE_ERROR = re.compile(r"\[METAL\]|command buffer|\bcu(?:da|blas|dnn)\w*.* failed", re.I)

_OUT_OF_MEMORY = ("allocate", "out of memory", "insufficient memory", "malloc", "resource limit")

MOST_PARKED = 8  # errors that `settle` discards; each stream may have one


def kind() -> DeviceKind:
    return "cpu" if mx.default_device() == mx.cpu else "gpu"


def working_set_bytes() -> int | None:
    size = mx.device_info().get("max_recommended_working_set_size")
    return int(size) if size else None


def buffer_limit() -> int | None:
    count = mx.device_info().get("resource_limit")
    return int(count) if count else None


def prepare(pool_bytes: int) -> None:
    mx.set_cache_limit(pool_bytes)


def wire(size: int) -> int:
    """Keep at most `size` bytes of MLX's memory wired; return the limit. macOS 14 ignores it."""
    most = working_set_bytes()
    if most is None:
        return 0
    limit = min(size, most)
    mx.set_wired_limit(limit)
    return limit


# -- errors ----------------------------------------------------------------------------------------


def is_device_error(error: BaseException | None) -> bool:
    """Return whether `error` reports a command that failed on the device: see `confirm`."""
    return isinstance(error, RuntimeError) and _DEVICE_ERROR.search(str(error)) is not None


def is_out_of_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in _OUT_OF_MEMORY)


def defers_errors() -> bool:
    """Return whether an evaluation may return although its commands failed, as on a GPU."""
    return kind() == "gpu"


def holds_inputs() -> bool:
    """Return whether a pass holds the buffers that it reads until it has ended, as on a GPU.

    MLX copies a buffer that is held before it writes to it.
    """
    return kind() == "gpu"


def confirm() -> None:
    """Wait for all commands, and raise the error of any that failed; at once on a CPU.

    Every result up to now can be trusted afterwards.
    """
    if defers_errors():
        mx.synchronize()


def settle() -> None:
    """Wait for all commands, and discard the errors of those that failed.

    Raises the last error after `MOST_PARKED` waits: the device is then unusable.
    """
    for left in reversed(range(MOST_PARKED)):
        try:
            mx.synchronize()
        except RuntimeError:
            if not left:
                raise
        else:
            return
