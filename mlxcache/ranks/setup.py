"""A rank other than 0: it loads its part of the model, and follows rank 0 until the group ends."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from mlxcache.cache.capacity import pool_bytes
from mlxcache.config import disk_limit, machine_bytes, ram_limit, wired_size
from mlxcache.config.memory import MemoryPressure, read_footprint, read_pressure
from mlxcache.errors import MlxcacheError, ModelError, StoreError
from mlxcache.mlx_thread import MlxThread
from mlxcache.model import device, hub, kv, load
from mlxcache.ranks import operations as op
from mlxcache.ranks.follower import Follower
from mlxcache.ranks.group import (
    PING_S,
    SILENT_S,
    Place,
    Setup,
    Share,
    connect,
    divide,
    end_process,
    first_layer,
    share_of,
    versions,
    wait_for_all,
)
from mlxcache.ranks.tensor_links import with_probes
from mlxcache.store.parts import Mode, PartName
from mlxcache.store.store import Store

log = logging.getLogger("mlxcache.ranks")

WRITE_S = 2.0
"""Seconds from the loss of the connection to rank 0 to the end of the process."""

READ_S = 1.0
"""Seconds between two readings of the state of this machine."""

_SETUP = msgspec.msgpack.Decoder(Setup)
_QUESTION = msgspec.msgpack.Decoder(op.AnyQuestion)


def config_digest(model: Path) -> str:
    return hashlib.blake2b((model / "config.json").read_bytes(), digest_size=16).hexdigest()


class Rank:
    """A rank other than 0, from its connection to its end."""

    def __init__(self, place: Place, cache_dir: Path):
        self.place = place
        self._folder = cache_dir / "store"
        self._group: Any = None
        self._heard_at = time.monotonic()

    def run(self) -> None:
        """Load this rank's part, and repeat the operations of rank 0 until the group ends.

        Blocks until then; the process exits at the end. Ctrl-C is ignored, because it ends rank 0,
        and that ends the group. MLX runs on a thread of its own, so that other signals work while a
        pass hangs.
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends rank 0, and that the others
        thread = MlxThread(lambda error: end_process(f"rank {self.place.rank}: {error!r}"))
        thread.post(lambda: self._live(thread))
        thread.start()
        while thread.alive:
            thread.join(0.5)

    # -- on the MLX thread -------------------------------------------------------------------------

    def _live(self, thread: MlxThread) -> None:
        self._group = with_probes(lambda: mx.distributed.init(strict=True))
        links = connect(self.place.host, self._group)
        setup = _SETUP.decode(links.operations.recv_bytes())
        try:
            loaded = self._load(setup)
        except MlxcacheError as error:
            links.operations.send_bytes(msgspec.msgpack.encode(Share(str(error))))
            raise
        links.operations.send_bytes(msgspec.msgpack.encode(Share()))
        wait_for_all(self._group)
        layout = kv.survey(loaded.model, kv_bits=setup.kv_bits)
        machine, weights = machine_bytes(), loaded.info.weights_bytes
        limit = ram_limit(
            setup.ram,
            machine_bytes=machine,
            working_set_bytes=device.working_set_bytes(),
            weights_bytes=weights,
        )
        device.prepare(pool_bytes(limit))
        needed = weights + limit
        device.wire(wired_size(setup.wire, machine_bytes=machine, needed_bytes=needed))
        first = first_layer(loaded.model, setup.mode)
        share = share_of(layout, limit, first, device.buffer_limit())
        links.operations.send_bytes(msgspec.msgpack.encode(share))
        vitals = VitalsReader(lambda: follower.store)
        follower = Follower(
            loaded.model,
            layout,
            self._group,
            lambda it: self._open_store(it, setup.mode, needs_checkpoints=layout.opaque),
            rank=self.place.rank,
            vitals=lambda: vitals.latest,
        )
        vitals.start()
        self._heard_at = time.monotonic()
        for connection in (links.questions, links.heartbeat):
            asked = (connection, follower)
            threading.Thread(target=self._answer, args=asked, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            while follower.obey(links.operations.recv_bytes()):
                pass
        except (EOFError, OSError):
            log.warning("rank %d ends: the connection to rank 0 was lost", self.place.rank)
        vitals.stop()
        follower.close()
        links.close()
        mx.synchronize()
        os._exit(0)  # MLX ends the process with an error while a group exists

    def _load(self, setup: Setup) -> load.Loaded:
        path = hub.resolve(setup.model)
        if config_digest(path) != setup.config:
            raise ModelError(f"the config.json of {path} differs from that of rank 0")
        if (mine := versions()) != setup.versions:
            raise ModelError(f"versions differ: {mine} here, {setup.versions} on rank 0")
        group = self._group
        spec = load.ModelSpec(
            setup.model,
            adapter=setup.adapter,
            trust_remote_code=setup.trust_remote_code,
            images=False,
        )
        return load.load(
            spec, divide=lambda model, config: divide(model, config, group, setup.mode)
        )

    def _open_store(self, it: op.Open, mode: Mode, *, needs_checkpoints: bool) -> Store:
        name = PartName(it.namespace, mode, self.place.rank, self._group.size()).namespace
        limit = disk_limit(it.limit, self._folder)
        return Store.open(self._folder, name, limit, needs_checkpoints=needs_checkpoints)

    # -- on other threads --------------------------------------------------------------------------

    def _answer(self, connection: Any, follower: Follower) -> None:
        """Answer the questions that rank 0 asks over a connection.

        When the connection is lost, ends the process after `WRITE_S` seconds, so that files can
        still be written.
        """
        try:
            while True:
                question: Any = _QUESTION.decode(connection.recv_bytes())
                self._heard_at = time.monotonic()
                answer = follower.answer(question)
                connection.send_bytes(msgspec.msgpack.encode(answer))
        except (EOFError, OSError):
            time.sleep(WRITE_S)  # what was told before may still be written
            end_process(f"rank {self.place.rank}: rank 0 is gone")

    def _watch(self) -> None:
        """End the process if rank 0 has asked nothing for `SILENT_S` + `PING_S` seconds.

        Time in which this process was suspended itself is not counted.
        """
        step, silent, heard_at = PING_S / 4, 0.0, self._heard_at
        while silent <= SILENT_S + PING_S:
            time.sleep(step)
            silent = silent + step if self._heard_at == heard_at else 0.0
            heard_at = self._heard_at
        end_process(f"rank {self.place.rank}: rank 0 is silent")


class VitalsReader:
    """Thread that reads the state of this machine every `READ_S` seconds into `latest`."""

    def __init__(
        self,
        store: Callable[[], Store | None],
        look: Callable[[], MemoryPressure] = read_pressure,
        measure: Callable[[], int] = read_footprint,
    ):
        self.latest = op.Vitals()
        self._store, self._look, self._measure = store, look, measure
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlxcache-vitals", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def read(self) -> op.Vitals:
        used, limit = None, None
        if (store := self._store()) is not None:
            try:
                stats = store.stats()
                used, limit = stats.used_bytes, stats.limit_bytes
            except StoreError as error:
                log.debug("size of the disk tier in %s not read: %s", store.folder, error)
        pressure = self._look()
        return op.Vitals(int(pressure.level), pressure.why, self._measure(), used, limit)

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
