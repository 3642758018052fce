"""The model's own time for a warm turn, asked of a process that does nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class NoOwnTime(Exception):
    """The model cannot be measured by itself; says why."""


@dataclass(frozen=True, slots=True)
class OwnTime:
    """`mlxcache.model.own_time` in a process of its own."""

    process: subprocess.Popen[str]

    def ask(self, prefix: int, fed: int) -> tuple[float, float]:
        """Seconds for `fed` new tokens after `prefix`, and KV bytes per token. Raises NoOwnTime."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"prefix": prefix, "fed": fed}) + "\n")
            self.process.stdin.flush()
        answer = self.read()
        return answer["seconds"], answer["kv_bytes_per_token"]

    def ready(self) -> bool:
        """Whether the model is loaded and can be measured; waits until that is known."""
        try:
            self.read()
        except NoOwnTime:
            return False
        return True

    def read(self) -> dict[str, float]:
        """The next answer. Raises NoOwnTime."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "its process ended"}
        if "error" in answer:
            raise NoOwnTime(answer["error"])
        return {name: float(value) for name, value in answer.items()}


@contextlib.contextmanager
def measuring(model: Path, logs: Path) -> Iterator[OwnTime | None]:
    """The process, or None where the model cannot be measured by itself."""
    command = [sys.executable, "-m", "mlxcache.model.own_time", str(model)]
    with (logs / "own_time.log").open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            start_new_session=True,
        )  # fmt: skip
    try:
        own = OwnTime(process)
        yield own if own.ready() else None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
