"""Crash proof of a divided model: a rank is killed, frozen or cut off at random moments.

`python -m tests.proofs.ranks_crash --moments 30` takes about 20 minutes; exit status 1 on a
violation. Clients must get an error or the end, and all processes must have ended, within 10
seconds. The next group continues from disk. Cutting a link needs root on Linux, and is left out
elsewhere. `--neighbours` instead cuts the link between ranks 1 and 2 of three, over
which only tensors go.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer

from mlxcache.cli.ranks import RANK, free_port
from tests.served import Served, served
from tests.server.api import Api
from tests.toys.toy import make_toy

LIMIT_S = 10.0
"""Most seconds from the fault to the end of clients' requests and of all processes."""

WAIT_S = 60.0
"""Seconds after which a client or a process that goes on is given up."""

RANDOM_S = 4.0
"""Longest time from the start of load to the fault, in seconds."""

KILL, FREEZE, CUT = "killed", "frozen", "cut off"
NAMESPACE, OUTER, INNER = "mlxcache-ranks", "10.213.77.1", "10.213.77.2"
"""A network namespace for rank 1, and the addresses on both sides of its link."""

OUTSIDE, INSIDE = "mlxcache0", "mlxcache1"
"""The network devices on both sides."""

APART = "cut off from its neighbour"
SPACES = ("mlxcache-ranks-1", "mlxcache-ranks-2")
"""Network namespaces for ranks 1 and 2 of three."""

Messages = list[dict[str, Any]]


def can_cut() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    return subprocess.run(["ip", "netns", "list"], check=False, capture_output=True).returncode == 0


@contextmanager
def link() -> Iterator[None]:
    """A link to a network namespace; `cut` it with `ip link set ... down`."""
    _remove([OUTSIDE], [NAMESPACE])
    _ip(f"netns add {NAMESPACE}")
    try:
        _ip(f"link add {OUTSIDE} type veth peer name {INSIDE} netns {NAMESPACE}")
        _ip(f"addr add {OUTER}/30 dev {OUTSIDE}")
        _ip(f"link set {OUTSIDE} up")
        _ip(f"-n {NAMESPACE} addr add {INNER}/30 dev {INSIDE}")
        _ip(f"-n {NAMESPACE} link set {INSIDE} up")
        _ip(f"-n {NAMESPACE} link set lo up")
        yield
    finally:
        _remove([OUTSIDE], [NAMESPACE])


@contextmanager
def triangle() -> Iterator[None]:
    """Links between three ranks, of which the last two have namespaces; see `APART`.

    Rank 0 has 10.213.77.1. Rank 2 is known to the others by its address on the link to rank 1.
    """
    devices = ["mlxcachea", "mlxcacheb"]
    _remove(devices, SPACES)
    for name in SPACES:
        _ip(f"netns add {name}")
        _ip(f"-n {name} link set lo up")
    try:
        one, two = SPACES
        _ip(f"link add mlxcachea type veth peer name veth-a netns {one}")
        _ip(f"link add mlxcacheb type veth peer name veth-b netns {two}")
        _ip(f"-n {one} link add veth-c type veth peer name veth-c netns {two}")
        for where, address, device in (
            ("", "10.213.77.1", "mlxcachea"),
            (f"-n {one}", "10.213.77.2", "veth-a"),
            ("", "10.213.78.1", "mlxcacheb"),
            (f"-n {two}", "10.213.78.2", "veth-b"),
            (f"-n {one}", "10.213.79.1", "veth-c"),
            (f"-n {two}", "10.213.79.2", "veth-c"),
        ):
            _ip(f"{where} addr add {address}/30 dev {device}")
            _ip(f"{where} link set {device} up")
        _ip(f"-n {two} route add 10.213.77.1 via 10.213.78.1")
        yield
    finally:
        _remove(devices, SPACES)


def _remove(devices: Sequence[str], spaces: Sequence[str]) -> None:
    for device in devices:
        _ip(f"link del {device}", check=False)
    for name in spaces:
        _ip(f"netns del {name}", check=False)


def _ip(arguments: str, *, check: bool = True) -> None:
    subprocess.run(["ip", *arguments.split()], check=check, capture_output=True)


@dataclass(slots=True)
class Group:
    """A running group. `processes`: of all ranks, in their order. `server`: the one with HTTP."""

    server: Served
    processes: list[psutil.Process]

    def disturb(self, fault: str, rank: int) -> None:
        if fault == CUT:
            _ip(f"link set {OUTSIDE} down")
        elif fault == APART:
            _ip(f"-n {SPACES[0]} link set veth-c down")
        else:
            number = signal.SIGKILL if fault == KILL else signal.SIGSTOP
            self.processes[rank].send_signal(number)

    def ended_after(self, began: float) -> float:
        """Wait for the end of all processes; return the seconds since `began`."""
        psutil.wait_procs(self.processes, timeout=WAIT_S)
        for one in self.processes:
            if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                one.kill()
        self.server.process.wait(WAIT_S)
        return time.monotonic() - began


@dataclass(slots=True)
class Proof:
    """Groups that are disturbed one after another, and the violations found."""

    folder: Path
    rng: random.Random
    say: Callable[[str], None]
    ranks: int = 2
    neighbours: bool = False
    wrong: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    client_s: dict[str, float] = field(default_factory=dict)
    process_s: dict[str, float] = field(default_factory=dict)
    warm: Counter[str] = field(default_factory=Counter)
    _talk: Messages = field(default_factory=list)
    _asked: list[tuple[Messages, str]] = field(default_factory=list)
    _durable: int = 0

    def run(self, moments: int, deadline: float) -> None:
        """Disturb `moments` groups, or until `deadline`, then compare all texts."""
        family = "qwen3_moe" if self.neighbours else "llama"
        model = make_toy(self.folder / "toy", family)
        self._talk = [{"role": "system", "content": _words(self.rng, 200)}]
        kinds = [KILL, FREEZE, *([CUT] if can_cut() and self.ranks == 2 else [])]
        kinds = [APART] if self.neighbours else kinds
        for moment in range(moments):
            if time.monotonic() > deadline:
                break
            fault, rank = kinds[moment % len(kinds)], self.rng.randrange(self.ranks)
            with self._group(model, fault) as group:
                self._turn(Api(group.server))
                self._disturb(group, fault, rank)
            self.say(
                f"{moment + 1}/{moments}: rank {rank} {fault}; longest: clients "
                f"{max(self.client_s.values()):.1f} s, processes "
                f"{max(self.process_s.values()):.1f} s; wrong: {len(self.wrong)}"
            )
        with self._group(model, APART if self.neighbours else KILL) as group:
            self._turn(Api(group.server))
            group.server.stop(seconds=30.0)
        self._compare(model)

    @contextmanager
    def _group(self, model: Path, fault: str) -> Iterator[Group]:
        """Start the ranks that `fault` is for; without a link to cut, by mlx.launch."""
        cache = ("--cache-dir", str(self.folder / "cache"), "--ram", "400MB", "--disk", "2GB")
        flags = ("--model", str(model), "--no-anticipate", *cache)
        with ExitStack() as stack:
            if fault == CUT:
                stack.enter_context(link())
                yield self._by_hand(stack, flags, [OUTER, INNER], [NAMESPACE])
                return
            if fault == APART:
                stack.enter_context(triangle())
                addresses = ["10.213.77.1", "10.213.77.2", "10.213.79.2"]
                yield self._by_hand(stack, (*flags, "--pipeline"), addresses, SPACES)
                return
            hosts = ",".join(["127.0.0.1"] * self.ranks)
            server = stack.enter_context(served(*flags, "--hosts", hosts, home=self.folder))
            assert server.url
            found = {}
            for one in psutil.Process(server.process.pid).children(recursive=True):
                if (rank := one.environ().get(RANK)) is not None:
                    found[int(rank)] = one
            yield Group(server, [found[rank] for rank in sorted(found)])

    def _by_hand(
        self,
        stack: ExitStack,
        flags: tuple[str, ...],
        hosts: Sequence[str],
        spaces: Sequence[str],
    ) -> Group:
        """Ranks as mlx.launch starts them on several machines, all but the first in `spaces`."""
        port, hostfile = free_port(len(hosts)), self.folder / "hosts.json"
        ips = [[f"{host}:{port + rank}"] for rank, host in enumerate(hosts)]
        hostfile.write_text(json.dumps(ips))
        environ = {"MLX_HOSTFILE": str(hostfile)}

        def inside(space: str, command: Any, variables: dict[str, str]) -> subprocess.Popen[str]:
            whole = ["ip", "netns", "exec", space, sys.executable, "-m", *command]
            pipe = subprocess.PIPE
            return subprocess.Popen(whole, stdout=pipe, stderr=pipe, text=True, env=variables)

        others = []
        for rank, space in enumerate(spaces, 1):
            variables = environ | {RANK: str(rank)}
            others.append(Served(flags, self.folder, variables, start=partial(inside, space)))
            stack.callback(others[-1].process.kill)
        server = stack.enter_context(
            served(*flags, home=self.folder, environ=environ | {RANK: "0"})
        )
        assert server.url
        return Group(server, [psutil.Process(one.process.pid) for one in (server, *others)])

    def _turn(self, api: Api) -> None:
        """Continue the conversation; what was durable before the fault must be reused."""
        self._talk.append({"role": "user", "content": _words(self.rng, 40)})
        got = api.chat(self._talk, 12)
        least = min(self._durable, got.prompt - 1)
        if got.cached < least:
            self.wrong.append(f"{got.cached} of {least} durable tokens were reused")
        self.warm["all" if got.cached >= least else "less"] += 1
        self._asked.append(([*self._talk], got.text))
        self._talk.append({"role": "assistant", "content": got.text})

    def _disturb(self, group: Group, fault: str, rank: int) -> None:
        """Disturb a group under load, and measure how long clients and processes go on."""
        ends: list[float] = []
        clients = [
            threading.Thread(target=self._load, args=(group.server.url, i, ends)) for i in range(2)
        ]
        for one in clients:
            one.start()
        time.sleep(self.rng.uniform(0.0, RANDOM_S))
        sessions = httpx.get(f"{group.server.url}/v1/sessions", timeout=WAIT_S).json()["data"]
        longest = max(sessions, key=lambda one: int(one["turns"]))
        self._durable = int(longest["durable_tokens"])
        began = time.monotonic()
        group.disturb(fault, rank)
        seconds = group.ended_after(began)
        for one in clients:
            one.join(WAIT_S)
        client_s = max(ends) - began if len(ends) == 2 else WAIT_S
        self.faults[fault] += 1
        self.client_s[fault] = max(client_s, self.client_s.get(fault, 0.0))
        self.process_s[fault] = max(seconds, self.process_s.get(fault, 0.0))
        if max(client_s, seconds) > LIMIT_S:
            self.wrong.append(f"rank {rank} {fault}: clients {client_s:.1f} s, {seconds:.1f} s")
            self.say(group.server.output[-2000:])

    def _load(self, url: str, seed: int, ends: list[float]) -> None:
        """Stream a long reply to a new prompt until the server fails; note when."""
        text = _words(random.Random(self.rng.random()), 300 if seed else 20)
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4000}
        address = f"{url}/v1/chat/completions"
        try:
            with httpx.stream(
                "POST", address, json=body | {"stream": True}, timeout=WAIT_S
            ) as reply:
                for _ in reply.iter_bytes():
                    pass
        except httpx.HTTPError:
            pass  # a connection that ends is an answer too
        ends.append(time.monotonic())

    def _compare(self, model: Path) -> None:
        with served("--model", str(model), "--disk", "off", home=self.folder) as server:
            api = Api(server)
            for messages, text in self._asked:
                if api.chat(messages, 12).text != text:
                    self.wrong.append(f"another text after {len(messages)} messages: {text!r}")

    def report(self) -> list[str]:
        lines = [
            f"{count} times a rank was {fault}: clients had an error or the end within "
            f"{self.client_s[fault]:.1f} s, processes ended within {self.process_s[fault]:.1f} s"
            for fault, count in self.faults.items()
        ]
        turns = sum(self.warm.values())
        lines.append(f"{self.warm['all']} of {turns} turns reused all that was durable")
        return [*lines, *(f"wrong: {one}" for one in self.wrong), f"violations: {len(self.wrong)}"]


def _words(rng: random.Random, count: int) -> str:
    return " ".join(
        rng.choice(("oak", "elm", "ash", "fir", "yew", "box")) + str(rng.randrange(100))
        for _ in range(count)
    )


Moments = Annotated[int, typer.Option(help="Faults.")]
Minutes = Annotated[float, typer.Option(help="Most minutes until the last fault.")]
Ranks = Annotated[int, typer.Option(help="Processes.")]
Neighbours = Annotated[bool, typer.Option(help="Only cut the link of two other ranks.")]
Seed = Annotated[int | None, typer.Option(help="Of the random moments; printed.")]


def ranks_crash(
    moments: Moments = 30,
    minutes: Minutes = 60.0,
    ranks: Ranks = 2,
    neighbours: Neighbours = False,
    seed: Seed = None,
) -> None:
    """Kill, freeze and cut off ranks at random moments; exit with 1 on a violation."""
    chosen = random.randrange(10**6) if seed is None else seed
    typer.echo(f"seed {chosen}")
    with tempfile.TemporaryDirectory(prefix="mlxcache-ranks-") as folder:
        proof = Proof(Path(folder), random.Random(chosen), typer.echo, ranks, neighbours)
        proof.run(moments, time.monotonic() + 60 * minutes)
    for line in proof.report():
        typer.echo(line)
    raise typer.Exit(1 if proof.wrong else 0)


if __name__ == "__main__":
    typer.run(ranks_crash)
