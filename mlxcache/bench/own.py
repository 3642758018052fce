"""Measure the time that mlx-lm takes without a server, called the model's own time."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlxcache.bench.process import program


class NoOwnTime(Exception):
    """Error raised if the model cannot be measured without a server. The text gives the reason."""


@dataclass(frozen=True, slots=True)
class OwnTime:
    """Process that runs `mlxcache.model.own_time` to measure mlx-lm alone. Methods block."""

    process: subprocess.Popen[str]

    def ask(self, prefix: int, fed: int) -> tuple[float, float]:
        """Measure the time to the next token for `fed` new tokens after `prefix` cached ones.

        Returns that time in seconds, and the KV bytes per token. Raises NoOwnTime if mlx-lm fails
        or its process ended.
        """
        answer = self._answer(prefix=prefix, fed=fed)
        return answer["seconds"], answer["kv_bytes_per_token"]

    def decode(self, prefix: int, reply: int) -> tuple[float, float]:
        """Measure the decoding of `reply` tokens after `prefix` cached ones.

        Returns tokens per second, and the peak memory in bytes beyond that held at the first token.
        Raises NoOwnTime.
        """
        answer = self._answer(prefix=prefix, reply=reply)
        return answer["tokens_s"], answer["peak_bytes"]

    def prefill(self, prompt: int, step: int) -> float:
        """Measure the prefill of `prompt` tokens in passes of `step` tokens.

        Returns tokens per second. Raises NoOwnTime.
        """
        return self._answer(prompt=prompt, step=step)["tokens_s"]

    def _answer(self, **question: int) -> dict[str, float]:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        return self.read()

    def ready(self) -> bool:
        """Wait until the model is loaded; return False if it cannot be measured (see `measuring`).

        Call this once, before the measurements.
        """
        try:
            self.read()
        except NoOwnTime:
            return False
        return True

    def read(self) -> dict[str, float]:
        """Wait for the process's next answer and return its figures by name, such as `seconds`.

        Raises NoOwnTime if the answer is an error, or the process ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": "the measuring process ended"}
        if "error" in answer:
            raise NoOwnTime(answer["error"])
        return {name: float(value) for name, value in answer.items()}


@contextlib.contextmanager
def measuring(model: Path, logs: Path) -> Iterator[OwnTime | None]:
    """Start a process that measures the model in `model` with mlx-lm alone; end it with the block.

    Blocks until the model is loaded. Yields None if it cannot be measured: it cannot be loaded, or
    its cache cannot be cut back. The process writes errors to `own_time.log` in `logs`.
    """
    command = [sys.executable, "-m", "mlxcache.model.own_time", str(model)]
    with program(command, logs / "own_time.log", stdin=subprocess.PIPE) as process:
        own = OwnTime(process)
        yield own if own.ready() else None
