"""Limits of the machine's accelerator, and MLX's memory settings. MLX thread only."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

DeviceKind = Literal["cpu", "gpu"]


def kind() -> DeviceKind:
    """The kind of MLX's default device."""
    return "cpu" if mx.default_device() == mx.cpu else "gpu"


def working_set_bytes() -> int | None:
    """Metal's recommended working set, in bytes; None where the device reports none.

    Source: https://developer.apple.com/documentation/metal/mtldevice/recommendedmaxworkingsetsize
    """
    size = mx.device_info().get("max_recommended_working_set_size")
    return int(size) if size else None


def buffer_limit() -> int | None:
    """Maximum number of buffers that the device can hold; None where it reports none.

    Source: https://github.com/ml-explore/mlx/blob/main/mlx/backend/metal/device_info.cpp
    """
    count = mx.device_info().get("resource_limit")
    return int(count) if count else None


def prepare(pool_bytes: int) -> None:
    """Wire as much memory as Metal recommends, and bound MLX's pool of freed buffers."""
    # imported here: it takes seconds, and the other functions do not need it
    from mlx_lm.utils import maybe_set_recommended_wired_limit  # noqa: PLC0415

    maybe_set_recommended_wired_limit()
    mx.set_cache_limit(pool_bytes)
