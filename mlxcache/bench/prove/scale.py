"""Lengths and repetitions of a run of `mlxcache prove`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """Lengths in tokens, and number of repetitions (`runs`).

    `short` and `long` are prompt lengths of the first-token scenarios. `decode` are prompt lengths
    of the decoding scenario; its replies have `reply` tokens, and `crowds` are the numbers of
    replies generated at once. `prompt` is the prompt length of the prefill scenario, and `passes`
    are the lengths of the passes in which it is fed. `deep` is the prefix length of the memory
    scenarios, and `equal` are the prompt lengths of the equality scenario. `disk_bytes` is the size
    of a session in the disk scenarios. `quick` is True for the shorter lengths of --quick.
    """

    short: tuple[int, ...] = (4_000, 20_000)
    long: tuple[int, ...] = (100_000,)
    decode: tuple[int, ...] = (1_000, 32_000)
    crowds: tuple[int, ...] = (4, 8)
    reply: int = 128
    prompt: int = 16_384
    passes: tuple[int, ...] = (512, 1024, 2048, 4096)
    deep: int = 32_000
    equal: tuple[int, ...] = (300, 4_000)
    disk_bytes: int = 1_000_000_000
    runs: int = 3
    quick: bool = False


FULL = Scale()
QUICK = Scale(
    short=(300,), long=(600,), decode=(200,), crowds=(4,), reply=16, prompt=256,
    passes=(64, 256), deep=1_000, equal=(300,), disk_bytes=8_000_000, runs=1, quick=True,
)  # fmt: skip
