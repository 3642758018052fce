"""Everything that a scenario of `prove` needs: model, lengths, time left, and servers to start."""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from mlxcache.bench.client import Client
from mlxcache.bench.findings import Findings
from mlxcache.bench.own_time import OwnTime, measuring
from mlxcache.bench.process import Launch, Server, mlx_lm_server, ours
from mlxcache.bench.turns import Filler
from mlxcache.model.folder import native_length

WORKING_BYTES = 1_500_000_000
"""Bytes that a process needs besides weights and KV, for computing, MLX's pool and Python."""

USABLE_SHARE = 0.75
DISK_FACTOR = 1.3
"""Bytes of files per byte of a prompt's KV; replies and temporary files are included."""

START_S = 300.0
LEAST_WAIT_S = 60.0
"""Minimum timeout of a client in seconds; else it is the time that the run has left."""

SETTLED_S, PATIENCE_S = 0.3, 60.0
"""Seconds to wait after a server has written everything, and the maximum wait for that."""


class TimeUp(Exception):
    """The time limit of the run has passed."""


class Clock:
    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @contextlib.contextmanager
    def bounding(self) -> Iterator[None]:
        """Raise TimeUp in the block as soon as no time is left. Main thread only: uses SIGALRM."""

        def ring(number: int, frame: FrameType | None) -> None:
            raise TimeUp("the time limit has passed")

        if not self.left_s:
            raise TimeUp("the time limit has passed")
        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, self.left_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True, slots=True)
class Scale:
    """Lengths in tokens, and number of repetitions (`runs`).

    `short` and `long` are prompts of the first-token scenarios, `decode` those of decoding, with
    replies of `reply` tokens, `crowds` at once. `prompt` is that of prefill, fed in `passes`.
    `deep` is the prefix of the memory scenarios, `equal` the prompts of the equality scenario.
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


@dataclass(frozen=True, slots=True)
class Subject:
    path: Path
    label: str
    config: Mapping[str, Any]

    @property
    def weights_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes per token if every layer has plain 16-bit KV; 0 if config.json lacks sizes."""
        text = self.config.get("text_config") or self.config
        heads = text.get("num_key_value_heads") or text.get("num_attention_heads")
        width = text.get("head_dim") or (
            text.get("hidden_size", 0) // (text.get("num_attention_heads") or 1)
        )
        layers = text.get("num_hidden_layers")
        sizes = [one for one in (heads, width, layers) if isinstance(one, int)]
        return 2 * 2 * math.prod(sizes) if len(sizes) == 3 else 0

    @property
    def context_length(self) -> int:
        """Maximum tokens of prompt and reply; 0 if config.json does not say."""
        return native_length(self.config) or 0

    def needed_bytes(self, tokens: int, *, processes: int = 1, rows: int = 1) -> int:
        """Return the estimated bytes of `processes`, each with `rows` simultaneous replies.

        `tokens`: those of each prompt and its reply together.
        """
        kv = 1.1 * self.kv_bytes_per_token * tokens * rows
        return round(processes * (self.weights_bytes + kv + WORKING_BYTES))


def usable_bytes(device: Mapping[str, Any]) -> int:
    """Return the bytes that models may use, by MLX's description of the device. Source:
    https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.device_info.html
    """
    for name in ("max_recommended_working_set_size", "free_memory", "total_memory"):
        if isinstance(device.get(name), int) and device[name] > 0:
            return int(device[name])
    return round(USABLE_SHARE * psutil.virtual_memory().total)


def settle(client: Client) -> None:
    """Wait until a server has nothing to write to disk, for at most about a minute."""
    deadline = time.monotonic() + PATIENCE_S
    while client.get("/v1/cache")["pending_bytes"] and time.monotonic() < deadline:
        time.sleep(SETTLED_S / 3)
    time.sleep(SETTLED_S)


@dataclass(slots=True)
class Context:
    """Everything that a scenario is given. It writes its figures into `found`."""

    subject: Subject
    scale: Scale
    clock: Clock
    folder: Path
    usable_bytes: int
    found: Findings
    on_step: Callable[[str], None]

    @property
    def filler(self) -> Filler:
        return Filler(self.subject.path)

    def fits(self, what: str, tokens: int, *, processes: int = 1, rows: int = 1) -> bool:
        """Return whether prompts fit the model's context, the memory and the disk.

        If not, the measurement `what` is recorded in `found` as not run, with the reason.
        """
        longest = self.subject.context_length
        needed = self.subject.needed_bytes(tokens, processes=processes, rows=rows)
        files = DISK_FACTOR * self.subject.kv_bytes_per_token * tokens * rows
        free = shutil.disk_usage(self.folder).free
        if longest and tokens > longest:
            why = f"the model's context has {longest} tokens"
        elif needed > self.usable_bytes:
            usable = f"{self.usable_bytes / 1e9:.0f} GB are usable"
            why = f"needs about {needed / 1e9:.0f} GB of memory, {usable}"
        elif files > free:
            why = f"needs about {files / 1e9:.0f} GB of disk, {free / 1e9:.0f} GB are free"
        else:
            return True
        self.found.not_run.append(f"{what}: {why}")
        return False

    def in_time(self, what: str, seconds: float) -> bool:
        """Return whether the run has `seconds` left; if not, record `what` as not run."""
        left_s = self.clock.left_s
        if seconds > left_s:
            self.found.not_run.append(f"{what}: about {seconds:.0f} s needed, {left_s:.0f} s left")
        return seconds <= left_s

    @contextlib.contextmanager
    def serving(self, *extra: str, **variables: str) -> Iterator[Server]:
        """Yield an mlxcache server with a new cache folder, started when first used."""
        where = {"prefix": "cache-", "dir": self.folder, "ignore_cleanup_errors": True}
        with tempfile.TemporaryDirectory(**where) as cache:  # type: ignore[call-overload]
            launch = replace(ours(Path(cache), *extra), variables=variables)
            with self._server(launch) as server:
                yield server

    def theirs(self) -> Server:
        return self._server(mlx_lm_server())

    def own_time(self) -> AbstractContextManager[OwnTime]:
        return measuring(self.subject.path, self.folder)

    def _server(self, launch: Launch) -> Server:
        timeout = max(LEAST_WAIT_S, self.clock.left_s)
        return Server(launch, self.subject.path, self.folder, START_S, timeout)
