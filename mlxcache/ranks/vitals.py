"""State of one rank's machine, which it tells rank 0 with each answer of the heartbeat."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from mlxcache.config.memory import MemoryPressure, read_footprint, read_pressure
from mlxcache.errors import StoreError
from mlxcache.ranks.operations import Vitals
from mlxcache.store.store import Store

log = logging.getLogger("mlxcache.ranks")

READ_S = 1.0
"""Seconds between two readings."""


class VitalsReader:
    """Thread that reads the state of this machine every `READ_S` seconds; see `Vitals`.

    `store()` returns the rank's store, or None while it has none. `look()` returns the machine's
    memory pressure, `measure()` the memory of this process in bytes. `latest`: the last reading,
    `Vitals()` before the first. Any thread.
    """

    def __init__(
        self,
        store: Callable[[], Store | None],
        look: Callable[[], MemoryPressure] = read_pressure,
        measure: Callable[[], int] = read_footprint,
    ):
        self.latest = Vitals()
        self._store, self._look, self._measure = store, look, measure
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlxcache-vitals", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading. Does not block."""
        self._stopped.set()

    def read(self) -> Vitals:
        """Read the state of this machine now. Blocks for milliseconds. Raises OSError."""
        used, limit = None, None
        if (store := self._store()) is not None:
            try:
                stats = store.stats()
                used, limit = stats.used_bytes, stats.limit_bytes
            except StoreError as error:
                log.debug("size of the disk tier in %s not read: %s", store.folder, error)
        pressure = self._look()
        return Vitals(int(pressure.level), pressure.why, self._measure(), used, limit)

    def _run(self) -> None:
        while not self._stopped.wait(READ_S):
            try:
                self.latest = self.read()
            except OSError as error:  # no file descriptors, for example
                log.debug(
                    "figures of this rank's memory and disk not read, trying again in %g s: %s",
                    READ_S,
                    error,
                )
