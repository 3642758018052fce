"""Rank 0's side of a group: it has the others load their parts, and loads its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from mlx import nn

from mlxcache.config import disk_limit
from mlxcache.config.memory import MemoryPressure, read_pressure
from mlxcache.errors import GroupLost, ModelError, Unsupported
from mlxcache.model import device, kv
from mlxcache.model.kv import Layout
from mlxcache.ranks import operations as op
from mlxcache.ranks.division import Division, find_division, part_of
from mlxcache.ranks.group import (
    Links,
    Place,
    Setup,
    Share,
    Watch,
    accept_all,
    divide,
    first_layer,
    united,
    versions,
    wait_for_all,
)
from mlxcache.ranks.group_store import GroupStore, Whole, wait_for_outcome
from mlxcache.ranks.leader import Leader
from mlxcache.ranks.setup import config_digest
from mlxcache.ranks.tensor_links import with_probes
from mlxcache.store.parts import PartName
from mlxcache.store.store import Store

log = logging.getLogger("mlxcache.ranks")

_SHARE = msgspec.msgpack.Decoder(Share)


class RankZero:
    """The group as rank 0 sees it: connections, division of the model, and stores.

    Call the methods in the order of their definition, on the MLX thread, unless they say that any
    thread may call them. `place`: that of rank 0. `own_age()`: seconds that the current operation
    of the MLX thread has run. `on_loss(why)` is called on another thread if a rank is lost.
    `whole`: the layout of the undivided model, known after `divide`. Known after `survey` are
    `ram_limit`, the least budget of the other ranks in bytes, and `buffer_limit`, the smallest
    number of buffers that the device of any rank can hold, None without a limit. `namespace`: that
    of the undivided model, known after `open_store`; None before, and without a disk tier.
    """

    def __init__(self, place: Place, own_age: Callable[[], float], on_loss: Callable[[str], None]):
        self.place = place
        self.ram_limit: int | None = None
        self.buffer_limit: int | None = None
        self.whole: Layout | None = None
        self.namespace: str | None = None
        self._division: Division | str = "the model was not divided yet"
        self._kv_bits: int | None = None
        self._model_type = ""
        self._own_age, self._on_loss = own_age, on_loss
        self._links: Sequence[Links] = ()
        self._group: Any = None
        self._leader: Leader | None = None
        self._watch: Watch | None = None

    def gather(
        self,
        model: str,
        folder: Path,
        *,
        trust_remote_code: bool,
        adapter: str | None,
        kv_bits: int | None,
        ram: str | int,
        wire: str | int,
    ) -> None:
        """Wait until the other ranks have connected, then tell them to load their parts.

        `model`: the model's path or name on every machine. `folder`: where it is on this one.
        The other arguments are those of `Setup`. Blocks for the connections, not for the loads.
        Raises GroupLost.
        """
        self._kv_bits = kv_bits
        self._group = group = with_probes(lambda: mx.distributed.init(strict=True))
        self._links = accept_all(self.place.host, group)
        setup = Setup(
            model,
            self.place.mode,
            trust_remote_code,
            adapter,
            kv_bits,
            ram,
            wire,
            config_digest(folder),
            versions(),
        )
        for links in self._links:
            links.operations.send_bytes(msgspec.msgpack.encode(setup))

    def divide(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        """Reduce `model`, whose weights were not read yet, to the part of rank 0.

        `config`: its config.json. Raises ModelError if it cannot be divided.
        """
        self._model_type = str(config.get("model_type"))
        self.whole = kv.survey(model, kv_bits=self._kv_bits, evaluate=False)
        divide(model, config, self._group, self.place.mode)

    def survey(self, model: nn.Module, kv_bits: int | None) -> Layout:
        """Wait until all ranks have loaded their parts; return a layout that suits them all.

        `model`: the part of rank 0, loaded. `kv_bits`: bits of a quantised KV value, or None.
        Blocks. Raises GroupLost, and ModelError if a rank cannot load its part, or the parts do not
        fit together.
        """
        self._hear_shares()  # a rank that could not load its part makes no pass
        wait_for_all(self._group)
        layout = kv.survey(model, kv_bits=kv_bits)
        shares = self._hear_shares()
        own = part_of(layout, first_layer(model, self.place.mode))
        assert self.whole is not None
        try:
            self._division = find_division(
                part_of(self.whole),
                [own, *(share.tensors for share in shares)],
                self.place.mode,
                self._model_type,
            )
        except Unsupported as error:
            log.warning("snapshots disabled: %s", error)
            self._division = str(error)
        self.ram_limit = min(share.ram_limit for share in shares)
        limits = [device.buffer_limit(), *(share.buffer_limit for share in shares)]
        self.buffer_limit = min((one for one in limits if one is not None), default=None)
        self._leader = leader = Leader(
            self._group,
            [links.operations for links in self._links],
            [links.questions for links in self._links],
            [links.heartbeat for links in self._links],
        )
        self._watch = Watch(leader, self._own_age, self._on_loss)
        return united(layout, shares, leader)

    def _hear_shares(self) -> list[Share]:
        """Wait for the message of each other rank about its part; return them from rank 1.

        Raises GroupLost if a rank has ended, and ModelError if one cannot load its part.
        """
        shares = []
        for rank, links in enumerate(self._links, 1):
            try:
                share = _SHARE.decode(links.operations.recv_bytes())
            except (OSError, EOFError) as error:
                raise GroupLost(f"rank {rank} ended while it loaded the model") from error
            if share.failure is not None:
                raise ModelError(f"rank {rank}: {share.failure}")
            shares.append(share)
        return shares

    def open_store(
        self, folder: Path, namespace: str, setting: str | int, *, needs_checkpoints: bool
    ) -> Store:
        """Open the store of all ranks: rank 0's in `folder`, the others' in their own folders.

        `namespace`: that of the whole model. `setting`: the setting `disk`. Blocks. Raises
        StoreError if a rank has no store.
        """
        leader, size = self._leader, self._group.size()
        assert leader is not None
        leader.tell(op.Open(namespace, setting))
        wait_for_outcome(leader, op.STORE)
        own = Store.open(
            folder,
            PartName(namespace, self.place.mode, 0, size).namespace,
            disk_limit(setting, folder),
            needs_checkpoints=needs_checkpoints,
        )
        self.namespace = namespace
        whole = Whole(namespace, self.place.mode, size, self._division)
        return GroupStore(own, leader, whole, needs_checkpoints=needs_checkpoints)

    def figures(self) -> dict[str, Any]:
        """Return the part of `GET /v1/cache` about the division of the model.

        `mode`: as in `Place`. `size`: number of ranks. `others`: see `Watch.figures`. Any thread.
        """
        others = self._watch.figures() if self._watch is not None else []
        return {"mode": self.place.mode, "size": self._group.size(), "others": others}

    def read_pressure(self) -> MemoryPressure:
        """Return the greatest memory pressure of all machines of the group. Any thread."""
        own = read_pressure()
        other = self._watch.worst_pressure() if self._watch is not None else own
        return other if other.level > own.level else own

    def close(self) -> None:
        """End the group: the other ranks finish their queued writes to disk, then exit.

        Does not wait for them.
        """
        if self._watch is not None:
            self._watch.close()
        if self._leader is not None:
            self._leader.tell(op.End())
        for links in self._links:
            links.close()
