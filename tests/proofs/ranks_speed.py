"""Cost of repeating operations on other ranks: decoding beside mlx_lm.server on the same ranks.

`python -m tests.proofs.ranks_speed` takes about 8 minutes on a machine that does nothing else. Two
processes on this machine share a model, over the ring. Both servers are asked in turn, in pairs of
equal requests; the other server's processes are stopped meanwhile, or idle. Exit status 1 if the
median of the pairs' ratios is below `LEAST`.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

import psutil
import typer

from mlxcache.bench.client import Client, Refused
from mlxcache.bench.process import free_port as free_http_port
from mlxcache.bench.process import tail
from mlxcache.cli.ranks import LOCAL, free_port, launch_command
from tests.served import served
from tests.toys.toy import make_toy

LEAST = 0.95
"""Least ratio of decoding speeds, mlxcache to mlx_lm.server."""

READY_S = 120.0
"""Most seconds for a server to start."""

RANKS = 2


def make_model(folder: Path) -> Path:
    """Make a model of which a step takes about 10 ms on two cores; return its folder."""
    return make_toy(
        folder, "llama", hidden=1024, layers=8, heads=8, kv_heads=8, head_dim=128, intermediate=2816
    )


def tokens_per_second(port: int, model: str, prompt: str, tokens: int) -> float:
    """Stream one reply; return its tokens after the first per second."""
    said = [{"role": "user", "content": prompt}]
    reply = Client(port, model, READY_S).chat(said, tokens)
    if reply.generated_tokens != tokens or reply.decode_rate is None:
        raise AssertionError(f"{port}: {reply.generated_tokens} of {tokens} tokens")
    return reply.decode_rate


@contextmanager
def ours(model: Path, folder: Path) -> Iterator[int]:
    hosts = ",".join([LOCAL] * RANKS)
    flags = ("--model", str(model), "--hosts", hosts, "--ram", "1GB", "--disk", "1GB")
    cache = ("--cache-dir", str(folder / "cache"), "--no-anticipate")
    with served(*flags, *cache, home=folder) as server:
        try:
            yield int(server.url.rpartition(":")[2])
        finally:
            server.stop(seconds=30.0)


@contextmanager
def theirs(model: Path, folder: Path) -> Iterator[tuple[int, Callable[[int], None]]]:
    """Start mlx_lm.server by mlx.launch; yield its port, and a call that signals all of it."""
    hostfile, port = folder / "hosts.json", free_http_port()
    hostfile.write_text(json.dumps([{"ssh": LOCAL, "ips": [LOCAL]}] * RANKS))
    command = launch_command(hostfile, [], free_port(RANKS))
    server = ["-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)]
    command = [*command[: command.index("--") + 1], sys.executable, *server]
    with (folder / "theirs.log").open("wb") as log:
        process = psutil.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)

        def send(number: int) -> None:
            for one in process.children(recursive=True):
                one.send_signal(number)

        try:
            wait_until_ready(port, folder / "theirs.log")
            yield port, send
        finally:
            for one in [*process.children(recursive=True), process]:
                one.kill()
            process.wait()


def wait_until_ready(port: int, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            Client(port, "", 5.0).get("/v1/models")
        except Refused:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(tail(log))


def measure(
    pairs: int, tokens: int, folder: Path, say: Callable[[str], None]
) -> list[tuple[float, float]]:
    """Return the speeds of mlxcache and of mlx_lm.server in tokens per second, pair by pair."""
    model = make_model(folder / "model")
    found = []
    with ExitStack() as stack:
        other, send = stack.enter_context(theirs(model, folder))
        send(signal.SIGSTOP)
        own = stack.enter_context(ours(model, folder))

        def ask(port: int, pair: int) -> float:
            if port == other:
                send(signal.SIGCONT)
            try:
                return tokens_per_second(port, str(model), f"Tell me of tree {pair}.", tokens)
            finally:
                if port == other:
                    send(signal.SIGSTOP)

        for pair in range(-1, pairs):  # the first one warms both up
            speeds = {
                port: ask(port, pair) for port in ((own, other) if pair % 2 else (other, own))
            }
            if pair >= 0:
                found.append((speeds[own], speeds[other]))
                say(f"pair {pair + 1}: {speeds[own]:.1f} and {speeds[other]:.1f} tokens/s")
        send(signal.SIGCONT)
    return found


Pairs = Annotated[int, typer.Option(help="Pairs of requests.")]
Tokens = Annotated[int, typer.Option(help="Tokens of each reply.")]


def ranks_speed(pairs: Pairs = 9, tokens: Tokens = 200) -> None:
    """Compare the speed of decoding on two ranks with mlx_lm.server's; exit with 1 if below."""
    with tempfile.TemporaryDirectory(prefix="mlxcache-ranks-") as folder:
        found = measure(pairs, tokens, Path(folder), typer.echo)
    ratios = [own / other for own, other in found]
    typer.echo(
        f"decoding on {RANKS} ranks: mlxcache {median(own for own, _ in found):.1f} tokens/s, "
        f"mlx_lm.server {median(other for _, other in found):.1f} tokens/s; median ratio of "
        f"{pairs} pairs {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
    )
    raise typer.Exit(0 if median(ratios) >= LEAST else 1)


if __name__ == "__main__":
    typer.run(ranks_speed)
