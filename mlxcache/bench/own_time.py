"""How fast mlx-lm alone, without a server, runs a model: measured in a process of its own.

The process is `lone_model`, which alone imports mlx-lm.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxcache.bench.findings import NotApplicable


class NoOwnTime(Exception):
    """Error raised if a model cannot be measured without a server."""


@dataclass(frozen=True, slots=True)
class OwnTime:
    """Process that measures mlx-lm without a server. Methods block, and raise NoOwnTime."""

    process: subprocess.Popen[str]

    def ask(self, prefix: int, fed: int) -> tuple[float, float]:
        """Return seconds to the token after `fed` new ones, and KV bytes a token."""
        return self._call("seconds", prefix, fed), self._call("kv_bytes_per_token")

    def decode(self, prefix: int, reply: int) -> tuple[float, float]:
        """Return tokens per second, and peak bytes beyond those held at the first token."""
        rate, peak = self._call("decoding", prefix, reply)
        return rate, peak

    def prefill(self, prompt: int, step: int) -> float:
        return float(self._call("prefill", prompt, step))

    def _call(self, method: str, *args: int) -> Any:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps([method, *args]) + "\n")
            self.process.stdin.flush()
        return self.read()

    def read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the measuring process ended"}
        if isinstance(answer, dict):
            raise NoOwnTime(answer["error"])
        return answer


@contextlib.contextmanager
def measuring(model: Path, logs: Path) -> Iterator[OwnTime]:
    """Yield a process with a model loaded by mlx-lm. Raises NotApplicable if it can't be timed."""
    command = [sys.executable, "-m", "mlxcache.bench.lone_model", str(model)]
    pipe = subprocess.PIPE
    with (logs / "own_time.log").open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=errors, text=True, start_new_session=True
        )
    try:
        own = OwnTime(process)
        try:
            own.read()
        except NoOwnTime as why:
            raise NotApplicable(f"mlx-lm alone cannot be timed: {why}") from why
        yield own
    finally:
        process.kill()
        process.communicate()
