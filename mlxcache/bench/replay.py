"""Replay of a trace at servers: the same requests in the same order, one at a time.

The parts of a trace become filler text: parts with equal ids become equal text. Where a prompt
contains the reply of an earlier request, the text that the server really replied is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from mlxcache.bench.client import Client, Reply
from mlxcache.bench.process import Launch, ours, running
from mlxcache.bench.report import table_of
from mlxcache.bench.turns import Filler
from mlxcache.config import format_size
from mlxcache.errors import ConfigError
from mlxcache.model.examine import examine
from mlxcache.model.load import ModelSpec
from mlxcache.plan.cache import Memory
from mlxcache.plan.disk import UNLIMITED
from mlxcache.plan.simulate import Simulation, Speed, percentiles
from mlxcache.plan.trace import Request, Trace

SPEED = Speed(prefill=1000, decode=50)
"""Speeds that decide which user's turn comes next; all servers get the same order."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace, and the limits of the servers to which it is replayed.

    `users`: number of sessions open at once, for traces whose turns follow the turn before.
    `ram` and `disk`: limits in bytes; only mlxcache uses `disk`.
    """

    trace: Trace
    users: int
    ram: int
    disk: int

    def order(self, model: Path) -> list[Request]:
        """Return the requests in the order in which every server gets them, that of a simulation.

        Raises ConfigError for a trace without requests, or with longer ones than the model takes.
        """
        examined = examine(ModelSpec(str(model)))
        lengths = (one.prompt_tokens + one.reply_tokens for one in self.trace.requests)
        longest, most = max(lengths, default=0), examined.info.max_context_length
        if not longest:
            raise ConfigError("the trace has no requests: record some, or name another file")
        if longest > most:
            raise ConfigError(
                f"the longest request of the trace has {longest:,} tokens, and this model takes "
                f"{most:,}: shorten it with --trace-scale {most / longest:.2g} or less"
            )
        simulation = Simulation(examined.layout, Memory(UNLIMITED), SPEED, at_once=1)
        order = simulation.run(self.trace, self.users).order
        return [self.trace.requests[at] for at in order]

    def play(
        self,
        model: Path,
        folder: Path,
        others: Iterable[Launch],
        *,
        wait_s: float,
        status: Callable[[str], None],
    ) -> dict[str, dict[str, Any]]:
        """Replay the trace at mlxcache and `others` in turn; return the figures by server's name.

        Raises Refused if a server refuses a request, and NotStarted.
        """
        order, filler = self.order(model), Filler(model)
        found: dict[str, dict[str, Any]] = {}
        for launch in self.launches(folder, others):
            with running(launch, model, folder, wait_s) as server:

                def on_reply(done: int, name: str = launch.name) -> None:
                    status(f"{name}: {done} of {len(order)} requests")

                replies = Player(server.client, filler).play(order, on_reply)
                found[launch.name] = figures(replies, server.peak_bytes)
        return found

    def launches(self, folder: Path, others: Iterable[Launch]) -> Iterator[Launch]:
        """Yield how to start each server: mlxcache with its disk and without, then `others`.

        In the commands of `others`, {ram_mb} is replaced by the limit of RAM in MB. A command with
        the argument `mlx_lm` gets that limit in bytes, as --prompt-cache-bytes.
        """
        limits = ("--ram", str(self.ram), "--disk")
        yield ours(folder / "cache-trace", *limits, str(self.disk))
        without = ours(folder / "cache-trace-ram", *limits, "off")
        yield replace(without, name=f"{without.name}, --disk off")
        for one in others:
            command = tuple(
                part.replace("{ram_mb}", str(self.ram // 10**6)) for part in one.command
            )
            if "mlx_lm" in command:
                command += ("--prompt-cache-bytes", str(self.ram))
            yield replace(one, command=command)


def figures(replies: Sequence[Reply], peak_bytes: int) -> dict[str, Any]:
    prompt = sum(one.prompt_tokens or 0 for one in replies)
    known = any(one.cached_tokens is not None for one in replies)
    cached = sum(one.cached_tokens or 0 for one in replies) if known else None
    median, late = percentiles([one.first_s for one in replies])
    return {
        "requests": len(replies),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "fed_tokens": None if cached is None else prompt - cached,
        "hit_rate": None if cached is None else cached / max(1, prompt),
        "first_token_s": {"p50": median, "p95": late},
        "generated_tokens": sum(one.generated_tokens for one in replies),
        "peak_bytes": peak_bytes,
    }


class Player:
    """Client that replays one trace at one server. Different seeds share no text."""

    def __init__(self, client: Client, filler: Filler, seed: str = "trace"):
        self._client = client
        self._filler = filler
        self._seed = seed
        self._said: dict[int, str] = {}

    def play(self, requests: Iterable[Request], on_reply: Callable[[int], None]) -> list[Reply]:
        replies: list[Reply] = []
        for one in requests:
            reply = self._client.chat(self.messages(one), max(1, one.reply_tokens))
            said = (reply.text, *("" for _ in one.ids))
            reply_parts = one.ids[one.prompt_parts :].tolist()
            self._said |= dict(zip(reply_parts, said, strict=False))
            replies.append(reply)
            on_reply(len(replies))
        return replies

    def messages(self, request: Request) -> list[dict[str, str]]:
        """Return the messages of a prompt, with what the server really replied in earlier turns."""
        messages: list[dict[str, str]] = []
        prompt = slice(request.prompt_parts)
        ids, lengths = request.ids[prompt].tolist(), request.lengths[prompt].tolist()
        for id, tokens in zip(ids, lengths, strict=True):
            role = "assistant" if id in self._said else "user"
            text = self._said.get(id)
            if text is None:
                text = self._filler.text(tokens, f"{self._seed}/{id}")
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += text
            else:
                messages.append({"role": role, "content": text})
        return messages


def show_replay(console: Console, plan: Replay, found: Mapping[str, Mapping[str, Any]]) -> None:
    title = (
        f"A trace of {len(plan.trace.requests):,} requests ({plan.trace.form}), "
        f"{format_size(plan.ram)} of RAM each"
    )
    columns = ("fed, of prompt tokens", "reused", "first token p50", "p95", "peak memory")
    table = table_of(title, "server", right=columns)
    for name, one in found.items():
        fed, rate, peak = one["fed_tokens"], one["hit_rate"], one["peak_bytes"]
        table.add_row(
            name,
            f"{'-' if fed is None else f'{fed:,}'} of {one['prompt_tokens']:,}",
            "-" if rate is None else f"{rate:.1%}",
            *(f"{seconds:.2f} s" for seconds in one["first_token_s"].values()),
            format_size(peak) if peak else "-",
        )
    console.print(table)
