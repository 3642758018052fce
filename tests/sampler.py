"""The most that something was, looked at again and again beside a test."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Sampler:
    """Reads `value` every `pause_s` seconds on a thread of its own; `most` of `samples` values."""

    def __init__(self, value: Callable[[], int], pause_s: float = 0.0):
        self.most = 0
        self.samples = 0
        self._value = value
        self._pause_s = pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.most = max(self.most, self._value())
            self.samples += 1
            self._stop.wait(self._pause_s)
