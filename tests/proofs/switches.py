"""Two models of 1.2 GB in turn under a budget for one: memory by the system's count, and idleness.

`python -m tests.proofs.switches` takes some minutes and 3 GB of memory, `--idle` plays 50 unloads
of idle models instead; the exit status is 1 if a bound is missed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from mlxcache.bench.client import Client, Refused, Reply
from mlxcache.bench.findings import Check
from mlxcache.bench.process import Launch, Server, running
from mlxcache.bench.turns import Filler
from mlxcache.config.memory import read_footprint
from tests.proofs.pair import (
    NEW,
    Conversation,
    Log,
    excess,
    launch_of,
    make_pair,
    weights_of,
    wrong_texts,
)
from tests.proofs.system_count import Count, counting, read_peak
from tests.proofs.under_load import await_decode

FAMILIES = ("qwen3_moe", "qwen3_next")
WEIGHTS_BYTES, KV_HEADS = 1_200_000_000, 8
KV_PART = 0.225
"""Budget besides the weights of one model, as a part of these."""

SWITCHES, FIRST_TOKENS, TURN_TOKENS, REPLY_TOKENS = 20, 2000, 50, 100
OVER = 0.05
"""Largest excess over the budget, as a part of it."""

SAMPLES_S = 20
READ_PART = 0.1
"""Most bytes read from files while a reply is written, as a part of a model's weights."""

IDLE_WEIGHTS_BYTES, IDLE_RAM, IDLE_S = 300_000_000, "2GB", 0.5
UNLOADS, IDLE_REPLY_TOKENS = 50, 8
MOST_LEFT, GROWN = 300_000_000, 10_000_000
"""Most bytes that a server with unloaded models holds more than an empty one, and most by which the
last tenth of the unloads exceeds the second one."""

SETTLE_S, START_S, POLL_S = 60.0, 120.0, 0.02


@dataclass(slots=True)
class Turn:
    """A turn: when its reply began and ended, on the clock of `Count`, and what it fed too much."""

    began: float
    ended: float
    reply: Reply
    excess: int | None


@dataclass(slots=True)
class Played:
    """Turns of a proof, requests with a lost prefix, and prompt tokens read from disk."""

    turns: list[Turn] = field(default_factory=list)
    lost: int = 0
    restored: int = 0

    @property
    def most(self) -> int:
        return max((one.excess for one in self.turns if one.excess is not None), default=10**9)


def ask(client: Client, talk: Conversation, tokens: int, reply_tokens: int) -> Turn:
    known, began = talk.tokens, time.perf_counter()
    reply = talk.ask(client, tokens if known else FIRST_TOKENS, reply_tokens)
    more = excess(reply, known) if known else None
    return Turn(began + reply.first_s, began + reply.last_s, reply, more)


def make_talks(paths: Mapping[str, Path]) -> list[Conversation]:
    return [Conversation(name, Filler(path), name) for name, path in paths.items()]


# -- switches --------------------------------------------------------------------------------------


def alternate(client: Client, talks: list[Conversation], switches: int) -> Played:
    """Send turns to both models in turn, each one while the reply before it is written.

    First both are loaded once, because the files of a new model are hashed.
    """
    played = Played()
    for talk in talks:
        Client(client.port, talk.model).chat([{"role": "user", "content": "Hello."}], 4)
    with ThreadPoolExecutor(2) as pool:
        pending: Future[Turn] | None = None
        for number in range(switches + 2):
            talk = talks[number % 2]
            following = pool.submit(ask, client, talk, TURN_TOKENS, REPLY_TOKENS)
            if pending is not None:
                played.turns.append(pending.result())
            await_decode(client, following, talk.model)
            pending = following
        assert pending is not None
        played.turns.append(pending.result())
    records = client.get("/v1/requests?limit=1000")["data"]
    played.lost = count_lost(records)
    played.restored = sum(one["restored_tokens"] for one in records)
    return played


def count_lost(records: Sequence[Mapping[str, Any]]) -> int:
    """Return how many requests fed a prefix again that was computed before."""
    return sum(one["lost"] is not None and one["lost"]["lost_tokens"] > 0 for one in records)


def read_beside(played: Played, count: Count) -> int | None:
    """Return the most bytes that were read from files while a reply was written, if known."""
    found = [count.read_between(turn.began, turn.ended) for turn in played.turns]
    known = [one for one in found if one is not None]
    return max(known) if known else None


def twenty_switches(
    folder: Path, weights_bytes: int, switches: int, kv_part: float = KV_PART
) -> list[Check]:
    """Play switches under a budget that holds one model, and check all bounds.

    `kv_part`: the budget besides the weights of one model, as a part of these.
    """
    empty = empty_bytes(folder)
    paths = make_pair(folder, FAMILIES, weights_bytes, KV_HEADS)
    size = max(weights_of(path) for path in paths.values())
    ram = int((1 + kv_part) * size)
    launch, talks = launch_of(paths, folder, "--ram", str(ram)), make_talks(paths)
    with running(launch, paths["one"], folder, START_S) as server:
        base = _base(server, empty)
        with counting(server.pid) as count:
            played = alternate(server.client, talks, switches)
        figures = server.client.get("/v1/cache")
        loads = sum(one["loads"] for one in figures["models"])
        if played.most > NEW:
            print(Log(folder, server.client.port).text)
        peak = max(count.most, read_peak(server.pid) or 0)
    over = (peak - base - ram) / ram
    read = read_beside(played, count)
    seconds = sum(turn.ended - turn.began for turn in played.turns)
    print(
        f"two models of {size / 1e6:.0f} MB, --ram {ram / 1e6:.0f}MB; idle without MLX's part "
        f"{base / 1e6:.0f} MB, most {count.most / 1e6:.0f} MB in {len(count.times)} samples, "
        f"{count.longest_gap_s * 1e3:.0f} ms apart at most, peak {peak / 1e6:.0f} MB; the budget's "
        f"own high water {figures['memory']['high_water_bytes'] / 1e6:.0f} MB; "
        f"{(read or 0) / 1e6:.1f} MB read beside replies, which took {seconds:.1f} s in all; "
        f"{played.restored} prompt tokens came from disk",
        flush=True,
    )
    return [
        Check("tokens fed besides new ones", played.most, NEW),
        Check("turns after the first of each", len(played.turns) - 2, switches, least=True),
        Check("weights read again", loads, switches - 1, least=True),
        Check("requests with a lost prefix", played.lost, 0),
        Check("most memory beyond the budget, as a part of it", over, OVER),
        Check("most memory, as a part of the weights", (count.most - base) / size, 1, least=True),
        Check("samples per second", count.per_second, SAMPLES_S, least=True),
        *_read_check(read, size),
        Check("wrong replies", _count_wrong(paths, talks), 0),
    ]


def _read_check(read: int | None, size: int) -> list[Check]:
    name = "bytes read while a reply is written, as a part of the weights"
    return [Check(name, read / size, READ_PART)] if read is not None else []


def _base(server: Server, empty: int) -> int:
    """Return the bytes of the idle server without those that MLX allocates, `empty` at most."""
    mlx = server.client.get("/v1/cache")["mlx"]
    return min(empty, int(server.idle_bytes - mlx["active_bytes"] - mlx["pool_bytes"]))


def _count_wrong(paths: Mapping[str, Path], talks: list[Conversation]) -> int:
    wrong = wrong_texts(paths, talks)
    print("\n".join(wrong) or "all replies are mlx-lm's")
    return len(wrong)


# -- idle unload -----------------------------------------------------------------------------------


def empty_bytes(folder: Path) -> int:
    """Return the footprint of a server of the demo, which has answered one request."""
    command = (sys.executable, "-m", "mlxcache.cli.main", "serve", "--port", "{port}")
    launch = Launch("empty", (*command, "--ram", "1GB", "--cache-dir", str(folder / "empty")))
    with running(launch, Path("demo"), folder, START_S) as server:
        time.sleep(1)
        return server.resident()


@dataclass(slots=True)
class Rest:
    """Bytes of a process with both models loaded, and after both were unloaded."""

    loaded: int
    unloaded: int


def idle_cycle(server: Server, talks: list[Conversation], played: Played) -> Rest:
    """Send a turn to each model, and wait until both are unloaded and their KV is on disk."""
    client = server.client
    with ThreadPoolExecutor(2) as pool:
        tokens = IDLE_REPLY_TOKENS
        asked = [pool.submit(ask, client, talk, 20, tokens) for talk in talks]
        played.turns += [one.result() for one in asked]
    loaded = read_footprint(server.pid)
    end = time.monotonic() + SETTLE_S
    while any(
        one["kv_bytes"] or one["state"] != "unloaded" for one in client.get("/v1/cache")["models"]
    ):
        if time.monotonic() > end:
            raise Refused(0, f"weights or KV stay in memory for {SETTLE_S:g} s")
        time.sleep(POLL_S)
    time.sleep(0.2)
    return Rest(loaded, read_footprint(server.pid))


def idle_unloads(folder: Path, weights_bytes: int, unloads: int) -> list[Check]:
    empty = empty_bytes(folder)
    paths = make_pair(folder, FAMILIES, weights_bytes, KV_HEADS)
    flags = ("--ram", IDLE_RAM, "--idle-unload", f"{IDLE_S}s")
    launch, talks, played = launch_of(paths, folder, *flags), make_talks(paths), Played()
    rests: list[Rest] = []
    with running(launch, paths["one"], folder, START_S) as server:
        for number in range(unloads):
            rests.append(idle_cycle(server, talks, played))
            print(
                f"unload {number + 1}: {rests[-1].loaded / 1e6:.0f} MB loaded, "
                f"{rests[-1].unloaded / 1e6:.0f} MB unloaded, {empty / 1e6:.0f} MB empty",
                flush=True,
            )
        loads = min(one["loads"] for one in server.client.get("/v1/cache")["models"])
        records = server.client.get("/v1/requests?limit=1000")["data"]
    warm = [one for one in records if one["cached_tokens"] > NEW]
    restored = min((one["restored_tokens"] / one["cached_tokens"] for one in warm), default=0.0)
    tenth = max(1, unloads // 10)
    early = fmean(one.unloaded for one in rests[tenth : 2 * tenth])
    late = fmean(one.unloaded for one in rests[-tenth:])
    left = max(one.unloaded for one in rests) - empty
    print(f"unloaded: {early / 1e6:.1f} MB in the second tenth, {late / 1e6:.1f} MB in the last")
    return [
        Check("unloaded, beyond an empty server", left, MOST_LEFT, "bytes"),
        Check("unloaded, last tenth beyond the second", late - early, GROWN, "bytes"),
        Check("reloads of each model", loads, unloads - 1, least=True),
        Check("tokens fed besides new ones", played.most, NEW),
        Check("warm turns", len(warm), 2 * (unloads - 1), least=True),
        Check("part of reused tokens that came from disk", restored, 0.99, least=True),
        Check("requests with a lost prefix", count_lost(records), 0),
        Check("wrong replies", _count_wrong(paths, talks), 0),
    ]


def switches(
    *,
    idle: Annotated[bool, typer.Option(help="Unload idle models, 50 times.")] = False,
) -> None:
    """Measure servers of two models that take turns, or that are idle again and again."""
    with tempfile.TemporaryDirectory(prefix="mlxcache-switches-") as name:
        if idle:
            checks = idle_unloads(Path(name), IDLE_WEIGHTS_BYTES, UNLOADS)
        else:
            checks = twenty_switches(Path(name), WEIGHTS_BYTES, SWITCHES)
    for check in checks:
        bound = "at least" if check.least else "at most"
        measured = f"{check.measured:.4g} ({bound} {check.bound:.4g}) {check.unit}".rstrip()
        print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {measured}")
    sys.exit(int(not all(check.ok for check in checks)))


if __name__ == "__main__":
    typer.run(switches)
