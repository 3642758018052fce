"""Everything that a scenario needs: the model, lengths, time left, and servers to start."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from mlxcache.bench.client import Client
from mlxcache.bench.own import OwnTime, measuring
from mlxcache.bench.process import Launch, Lives, mlx_lm_server, ours
from mlxcache.bench.prove.clock import Clock
from mlxcache.bench.prove.findings import Findings
from mlxcache.bench.prove.scale import Scale
from mlxcache.bench.text import Filler
from mlxcache.errors import ModelError

WORKING_BYTES = 1_500_000_000
"""Bytes that a process needs besides weights and KV, for computing, MLX's pool and Python."""

USABLE_SHARE = 0.75
DISK_FACTOR = 1.3
"""Bytes of files per byte of a prompt's KV; replies and temporary files are included."""

LEAST_WAIT_S = 60.0
"""Minimum timeout of a client in seconds. The time limit of the run may end a scenario earlier."""

SETTLED_S, PATIENCE_S = 0.3, 60.0
"""Seconds to wait after a server has written everything, and the maximum wait for that."""


class NotApplicable(Exception):
    """Error raised if a scenario cannot run on this system or model. The text says why."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Model to be measured.

    `path` is its folder, `label` its name in the report, and `config` the content of its
    config.json.
    """

    path: Path
    label: str
    config: Mapping[str, Any]

    @property
    def weights_bytes(self) -> int:
        """Total size of the weight files, in bytes."""
        return sum(file.stat().st_size for file in self.path.glob("*.safetensors"))

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes per token, if every layer has plain 16-bit KV.

        It is 0 if config.json does not have the sizes.
        """
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
        text = self.config.get("text_config") or self.config
        length = text.get("max_position_embeddings")
        return length if isinstance(length, int) else 0

    def needed_bytes(self, tokens: int, *, processes: int = 1, rows: int = 1) -> int:
        """Return the estimated bytes of memory for `rows` simultaneous replies, weights included.

        `tokens`: tokens of each prompt and its reply together. The result is the sum of `processes`
        processes, each of which loads the weights and generates all `rows` replies.
        """
        kv = 1.1 * self.kv_bytes_per_token * tokens * rows
        return round(processes * (self.weights_bytes + kv + WORKING_BYTES))


def read_config(folder: Path) -> Mapping[str, Any]:
    """Return the content of the config.json of the model in `folder`.

    Raises ModelError if the file cannot be read or is not a JSON object.
    """
    try:
        value = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} has no readable config.json of a model: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{folder} is not a model: its config.json is not a JSON object.")
    return value


def usable_bytes(device: Mapping[str, Any]) -> int:
    """Return the bytes of memory that models may use.

    `device`: MLX's description of the device, such as a result of `mx.device_info`. If it names no
    size of memory, three quarters of the machine's memory are returned. Source:
    https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.device_info.html
    """
    for name in ("max_recommended_working_set_size", "free_memory", "total_memory"):
        if isinstance(device.get(name), int) and device[name] > 0:
            return int(device[name])
    return round(USABLE_SHARE * psutil.virtual_memory().total)


def settle(client: Client) -> None:
    """Wait until the server of `client` has nothing to write to disk, and `SETTLED_S` s more.

    After `PATIENCE_S` seconds of writing it stops waiting and returns normally. Raises Refused if
    the server answers a request with an error or cannot be reached.
    """
    deadline = time.monotonic() + PATIENCE_S
    while client.get("/v1/cache")["pending_bytes"] and time.monotonic() < deadline:
        time.sleep(SETTLED_S / 3)
    time.sleep(SETTLED_S)


@dataclass(slots=True)
class Context:
    """Everything that a scenario is given. The scenario writes its figures into `found`.

    `subject` is the model, and `clock` has the time left of the run. `folder` is for files, and
    `usable_bytes` is the memory that models may use. The scenario calls `on_step` with a text at
    each step. `wait_s` is the time in seconds that a server has to start.
    """

    subject: Subject
    scale: Scale
    clock: Clock
    folder: Path
    usable_bytes: int
    found: Findings
    on_step: Callable[[str], None]
    wait_s: float = 300.0
    _started: int = field(default=0, repr=False)

    @property
    def filler(self) -> Filler:
        """Generator of filler text of an exact number of the model's tokens.

        Raises OSError or ValueError if the model has no tokenizer.json.
        """
        return Filler(self.subject.path)

    def fits(self, what: str, tokens: int, *, processes: int = 1, rows: int = 1) -> bool:
        """Return whether a prompt of `tokens` fits the model's context, the memory and the disk.

        The memory is `usable_bytes`; `processes` and `rows` (prompts at once) are as for
        `Subject.needed_bytes`. If it does not fit, the measurement `what`, a text, is recorded in
        `found` as not run, with the reason.
        """
        longest = self.subject.context_length
        if longest and tokens > longest:
            self.found.not_run.append(f"{what}: the model's context has {longest} tokens")
            return False
        needed = self.subject.needed_bytes(tokens, processes=processes, rows=rows)
        if needed > self.usable_bytes:
            self.found.not_run.append(
                f"{what}: needs about {needed / 1e9:.0f} GB of memory, "
                f"{self.usable_bytes / 1e9:.0f} GB are usable"
            )
            return False
        files = DISK_FACTOR * self.subject.kv_bytes_per_token * tokens * rows
        free = shutil.disk_usage(self.folder).free
        if files > free:
            self.found.not_run.append(
                f"{what}: needs about {files / 1e9:.0f} GB of disk, {free / 1e9:.0f} GB are free"
            )
            return False
        return True

    def in_time(self, what: str, seconds: float) -> bool:
        """Return whether the run has `seconds` left.

        If not, the measurement `what`, a text, is recorded in `found` as not run.
        """
        if seconds > self.clock.left_s:
            self.found.not_run.append(
                f"{what}: about {seconds:.0f} s needed, {self.clock.left_s:.0f} s left"
            )
            return False
        return True

    def client(self, lives: Lives) -> Client:
        """Return a client of the server of `lives`, whose timeout is the time left of the run.

        The server is started if it does not run. The timeout is at least `LEAST_WAIT_S`.
        """
        return replace(lives.server.client, timeout=max(LEAST_WAIT_S, self.clock.left_s))

    @contextlib.contextmanager
    def serving(self, *extra: str, variables: Mapping[str, str] | None = None) -> Iterator[Lives]:
        """Yield an mlxcache server with the arguments `extra` of `serve`; it ends with the block.

        `variables` are added to its environment. It is started when it is first used; see `Lives`.
        Its cache folder is new and is removed at the end.
        """
        self._started += 1
        with ExitStack() as stack:
            cache = self.folder / f"cache-{self._started}"
            stack.callback(shutil.rmtree, cache, ignore_errors=True)
            launch = replace(ours(cache, *extra), variables=variables or {})
            yield self._lives(launch, stack)

    @contextlib.contextmanager
    def theirs(self) -> Iterator[Lives]:
        """Yield `mlx_lm.server` with its default settings, which ends with the block.

        It is started when it is first used; see `Lives`.
        """
        with ExitStack() as stack:
            yield self._lives(mlx_lm_server(), stack)

    def _lives(self, launch: Launch, stack: ExitStack) -> Lives:
        lives = Lives(launch, self.subject.path, self.folder, self.wait_s)
        stack.callback(lives.end)
        return lives

    @contextlib.contextmanager
    def own_time(self) -> Iterator[OwnTime]:
        """Yield a process that measures mlx-lm without a server; it ends with the block.

        Raises NotApplicable if mlx-lm cannot load the model, or cannot trim its cache, which the
        measurement needs.
        """
        with measuring(self.subject.path, self.folder) as own:
            if own is None:
                raise NotApplicable(
                    "mlx-lm cannot trim this model's cache, which measuring it needs"
                )
            yield own
