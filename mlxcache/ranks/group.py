"""Making a group of ranks: connections, division of the model, and what all ranks agree on."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx import nn

from mlxcache.config.memory import NO_PRESSURE, MemoryPressure, PressureLevel
from mlxcache.errors import GroupLost, ModelError
from mlxcache.model import kv
from mlxcache.model.adapters import class_name
from mlxcache.model.grouped import NAME as LAYER_CACHE
from mlxcache.model.kv import Layout
from mlxcache.ranks import operations as op
from mlxcache.ranks.division import Part, part_of
from mlxcache.ranks.leader import PULSE_S, Leader
from mlxcache.store.parts import Mode

log = logging.getLogger("mlxcache.ranks")

CONNECT_S = 60.0
"""Most seconds for the ranks of a group to find each other."""

PING_S = 0.5
"""Seconds between two questions of rank 0 whether the other ranks still run."""

SILENT_S = PULSE_S
"""Seconds without a question after which rank 0 counts as lost."""

STUCK_S = 60.0
"""Seconds after which an operation that has not ended counts as hung."""

KEY_BYTES = 32
"""Length of the secret with which ranks prove that they belong to the group."""

_GREETING = msgspec.msgpack.Decoder(tuple[int, str])

PACKAGES = ("mlxcache", "mlx", "mlx-lm")


class Setup(msgspec.Struct, frozen=True):
    """First message of rank 0 to each other rank: the model to load, and its division.

    `config`: digest of the model's config.json. `versions`: those of the `PACKAGES` on rank 0. From
    the settings `ram` and `wire` each rank computes the budget of its machine and how much is
    wired.
    """

    model: str
    mode: Mode
    trust_remote_code: bool
    adapter: str | None
    kv_bits: int | None
    ram: str | int
    wire: str | int
    config: str
    versions: dict[str, str]


class Share(msgspec.Struct, frozen=True):
    """Message of a rank to rank 0 about the part of the model that it has loaded.

    `failure`: why the part cannot be loaded, or None. `runs`: the part has layers with KV of every
    position. `states`: it has layers that need checkpoints.
    """

    failure: str | None = None
    bytes_per_token: int = 0
    checkpoint_bytes: int = 0
    running_bytes: int = 0
    ram_limit: int = 0
    runs: bool = True
    states: bool = False
    batchable: bool = False
    unknown: list[str] = []
    tensors: Part = Part()
    buffer_limit: int | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """This process in its group: its rank, and the host on which rank 0 listens."""

    rank: int
    host: str
    mode: Mode = "tensor"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Address at which the other ranks connect to rank 0."""

    port: int
    key: bytes


def versions() -> dict[str, str]:
    return {name: version(name) for name in PACKAGES}


# -- the model -------------------------------------------------------------------------------------


def check_divisible(model: nn.Module, config: Mapping[str, Any], size: int, mode: Mode) -> None:
    """Raise ModelError if `model` cannot be divided among `size` ranks. Reads no weights."""
    kind = config.get("model_type", "this model")
    if mode == "pipeline":
        inner: Any = getattr(model, "model", None)
        if not hasattr(inner, "pipeline"):
            raise ModelError(
                f"mlx-lm cannot divide {kind} into a pipeline: leave out --pipeline, or serve it "
                "on one machine."
            )
        layers = len(inner.layers)
        if layers < size:
            raise ModelError(f"{kind} has {layers} layers, too few for {size} ranks.")
        if any(class_name(cache) == LAYER_CACHE for cache in kv.make_caches(model)):
            raise ModelError(
                f"In a pipeline of {kind}, layers use the KV of layers on other ranks, which "
                "cannot be kept: leave out --pipeline."
            )
        return
    if not hasattr(model, "shard"):
        raise ModelError(
            f"mlx-lm cannot divide the tensors of {kind}: try --pipeline, or serve it on one "
            "machine."
        )
    text = config.get("text_config") or config
    names = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "o_groups")
    for name in names:
        parts = text.get(name)
        if isinstance(parts, int) and parts % size:
            raise ModelError(
                f"{kind} has {name} = {parts}, which {size} ranks cannot divide evenly: use a "
                "number of ranks that divides it, or --pipeline if that is possible."
            )


def divide(model: nn.Module, config: Mapping[str, Any], group: Any, mode: Mode) -> None:
    """Reduce `model`, whose weights were not read yet, to this rank's part. Raises ModelError."""
    check_divisible(model, config, group.size(), mode)
    try:
        if mode == "pipeline":
            model.model.pipeline(group)
        else:
            model.shard(group)
    except (ValueError, AssertionError) as error:
        raise ModelError(
            f"The model cannot be divided among {group.size()} ranks: {error}"
        ) from error


def wait_for_all(group: Any) -> None:
    mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group, stream=mx.cpu))


def agree_on_meeting(group: Any, mine: Meeting | None) -> Meeting:
    """Send the meeting of rank 0 to all ranks, whose `mine` is None, and return it.

    Blocks until all have called this. It travels over the links of MLX's `group`, which are not
    encrypted.
    """
    told = [0] * (1 + KEY_BYTES) if mine is None else [mine.port, *mine.key]
    heard = mx.distributed.all_sum(mx.array(told, mx.int32), group=group, stream=mx.cpu)
    port, *key = np.asarray(heard).tolist()
    return Meeting(port, bytes(key))


def first_layer(model: nn.Module, mode: Mode) -> int:
    return int(model.model.start_idx) if mode == "pipeline" else 0


def share_of(
    layout: Layout, ram_limit: int, first: int = 0, buffer_limit: int | None = None
) -> Share:
    return Share(
        None,
        layout.bytes_per_token,
        layout.checkpoint_bytes,
        layout.running_bytes,
        ram_limit,
        bool(layout.specs),
        layout.opaque,
        layout.batchable,
        list(layout.unknown),
        part_of(layout, first),
        buffer_limit,
    )


def united(layout: Layout, shares: Sequence[Share]) -> Layout:
    """Return `layout`, that of rank 0, changed so that it suits all ranks.

    Bytes are those of the rank with the most. Checkpoints are needed if one rank needs them, and
    batches are made only if all ranks can. Raises ModelError for a division that leaves only some
    ranks with KV of every position.
    """
    runs = {bool(layout.specs), *(share.runs for share in shares)}
    if len(runs) > 1:
        raise ModelError(
            "The pipeline leaves some ranks without attention layers: use fewer ranks, or leave "
            "out --pipeline."
        )
    return replace(
        layout,
        bytes_per_token=max(layout.bytes_per_token, *(s.bytes_per_token for s in shares)),
        checkpoint_bytes=max(layout.checkpoint_bytes, *(s.checkpoint_bytes for s in shares)),
        running_bytes=max(layout.running_bytes, *(s.running_bytes for s in shares)),
        batchable=layout.batchable and all(s.batchable for s in shares),
        unknown=tuple(sorted({*layout.unknown, *(name for s in shares for name in s.unknown)})),
        stateful=any(s.states for s in shares),
        divided=True,
    )


# -- connections -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Links:
    """The connections of bytes between rank 0 and another rank, one for each kind of message."""

    operations: Any
    questions: Any
    heartbeat: Any

    def close(self) -> None:
        for connection in (self.operations, self.questions, self.heartbeat):
            connection.close()


KINDS = ("operations", "questions", "heartbeat")
"""Names of the connections in `Links`, in the order in which a rank makes them."""


def accept_all(host: str, group: Any) -> list[Links]:
    """Wait on rank 0 for the connections of all other ranks; return them in the order of ranks.

    Blocks without a limit until all other ranks have called `connect`. Raises GroupLost if one has
    not connected `CONNECT_S` seconds later.
    """
    key, wanted = secrets.token_bytes(KEY_BYTES), len(KINDS) * (group.size() - 1)
    ranks = range(1, group.size())
    found: dict[tuple[int, str], Any] = {}
    greeted: SimpleQueue[tuple[int, str, Any]] = SimpleQueue()
    ended = threading.Event()
    with Listener((host, 0), backlog=wanted) as listener:
        address = listener.address
        agree_on_meeting(group, Meeting(int(address[1]), key))
        args = (listener, key, greeted, ended)
        accepting = threading.Thread(target=_accept, args=args, daemon=True, name="mlxcache-accept")
        accepting.start()
        deadline = time.monotonic() + CONNECT_S
        try:
            while len(found) < wanted:
                left = max(0.0, deadline - time.monotonic())
                rank, kind, connection = greeted.get(timeout=left)
                found[rank, kind] = connection
        except Empty:
            missing = [r for r in ranks if any((r, kind) not in found for kind in KINDS)]
            raise GroupLost(f"ranks {missing} did not connect within {CONNECT_S:g} s") from None
        finally:
            ended.set()
            _poke(address)
            accepting.join(1.0)
    return [Links(*(found[rank, kind] for kind in KINDS)) for rank in ranks]


def _accept(listener: Listener, key: bytes, greeted: SimpleQueue[Any], ended: Event) -> None:
    """Accept connections until one comes after `ended` was set; each gets a thread for `_greet`."""
    while not ended.is_set():
        try:
            connection = listener.accept()
        except OSError as error:  # one that was closed at once; or the process has no more files
            log.debug("a connection of a rank was not accepted: %s", error)
            time.sleep(0.05)
            continue
        args = (connection, key, greeted)
        threading.Thread(target=_greet, args=args, daemon=True, name="mlxcache-greet").start()


def _greet(connection: Any, key: bytes, greeted: SimpleQueue[Any]) -> None:
    """Add (rank, kind, connection) to `greeted` if the connection is from a rank; else close it.

    Blocks for ever if the program at the other end sends nothing.
    """
    try:
        deliver_challenge(connection, key)
        answer_challenge(connection, key)
        rank, kind = _GREETING.decode(connection.recv_bytes())
    except (OSError, EOFError, AuthenticationError, msgspec.DecodeError):
        connection.close()
        return
    greeted.put((rank, kind, connection))


def _poke(address: Any) -> None:
    with suppress(OSError):
        socket.create_connection(address, timeout=1.0).close()


def connect(host: str, group: Any) -> Links:
    """Connect to rank 0 from another rank.

    Blocks without a limit until all others have called this, or `accept_all`. Raises GroupLost if
    rank 0 does not accept the connections within `CONNECT_S` seconds after that.
    """
    meeting = agree_on_meeting(group, None)
    made: list[Any] = []
    deadline = time.monotonic() + CONNECT_S
    for kind in KINDS:
        while True:
            try:
                connection = Client((host, meeting.port), authkey=meeting.key)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise GroupLost(f"rank 0 is not at {host}:{meeting.port}: {error}") from error
                time.sleep(0.1)
        connection.send_bytes(msgspec.msgpack.encode((group.rank(), kind)))
        made.append(connection)
    return Links(*made)


class Watch:
    """Thread of rank 0 that asks the other ranks every `every_s` seconds whether they still run.

    Calls `on_loss(why)` once, and ends, if a rank does not answer, or if an operation on any rank
    has run for more than `STUCK_S` seconds. A frozen host, and with some backends a lost one,
    causes no error in a collective operation: the pass hangs instead. `own_age()`: seconds that
    rank 0's own operation has run.
    """

    def __init__(
        self,
        leader: Leader,
        own_age: Callable[[], float],
        on_loss: Callable[[str], None],
        every_s: float = PING_S,
    ):
        self._leader, self._own_age, self._on_loss = leader, own_age, on_loss
        self._every_s = every_s
        self._answers: Sequence[op.Answer] = ()
        self._answered_at = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlxcache-ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()

    def figures(self) -> list[dict[str, Any]]:
        """Return the last answer of each of the other ranks; [] before any answer. Any thread.

        `silent_s`: seconds since that answer. `operation_s`: seconds that its operation had run
        then.
        """
        silent = round(time.monotonic() - self._answered_at, 1)
        return [
            {
                "rank": rank,
                "silent_s": silent,
                "operation_s": round(answer.age_s, 1),
                "pressure": PressureLevel(answer.vitals.pressure).name.lower(),
                "footprint_bytes": answer.vitals.footprint_bytes,
                "disk_used_bytes": answer.vitals.disk_used_bytes,
                "disk_limit_bytes": answer.vitals.disk_limit_bytes,
            }
            for rank, answer in enumerate(self._answers, 1)
        ]

    def worst_pressure(self) -> MemoryPressure:
        worst = NO_PRESSURE
        for rank, answer in enumerate(self._answers, 1):
            if answer.vitals.pressure > worst.level:
                level = PressureLevel(answer.vitals.pressure)
                worst = MemoryPressure(level, f"rank {rank}: {answer.vitals.why}")
        return worst

    def _run(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                answers = self._leader.ping()
            except GroupLost as error:
                if not self._ended.is_set():
                    self._on_loss(str(error))
                return
            self._answers, self._answered_at = answers, time.monotonic()
            oldest = max(self._own_age(), *(answer.age_s for answer in answers))
            if oldest > STUCK_S and not self._ended.is_set():
                self._on_loss(f"an operation has run for {oldest:.0f} s")
                return


def place_from(environ: Mapping[str, str], *, pipeline: bool = False) -> Place | None:
    """Return the place that `mlx.launch` gave this process; None for a process that runs alone.

    Reads what mlx.launch sets: MLX_RANK, and for the host of rank 0 MLX_HOSTFILE (ring),
    MLX_JACCL_COORDINATOR (JACCL) or NCCL_HOST_IP (NCCL). Raises ModelError.
    Source: https://ml-explore.github.io/mlx/build/html/usage/distributed.html
    """
    if "MLX_RANK" not in environ:
        return None
    if (file := environ.get("MLX_HOSTFILE")) is not None:
        try:
            if not (content := Path(file).read_bytes()).strip():
                return None  # of one host
            first = json.loads(content)[0][0]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ModelError(f"MLX_HOSTFILE {file} cannot be used: {error}") from error
        host = str(first).rpartition(":")[0]
    elif (coordinator := environ.get("MLX_JACCL_COORDINATOR")) is not None:
        host = coordinator.rpartition(":")[0]
    elif (nccl := environ.get("NCCL_HOST_IP")) is not None:
        host = nccl
    else:
        raise ModelError("MLX_RANK is set, but not the hosts: start the ranks with mlx.launch.")
    return Place(int(environ["MLX_RANK"]), host, "pipeline" if pipeline else "tensor")


def end_process(why: str) -> None:
    """Log `why`, and end this process with status 70 without waiting for its threads."""
    log.error("this process ends: %s", why)
    logging.shutdown()
    os._exit(70)
