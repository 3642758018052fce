"""Replay of a trace at servers: the same requests in the same order, one at a time.

The parts of a trace become filler text: parts with equal ids become equal text. Where a prompt
contains the reply of an earlier request, the text that the server really replied is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from mlxcache.bench.client import Client, Reply
from mlxcache.bench.process import Launch, ours, running
from mlxcache.bench.text import Filler
from mlxcache.config import format_size
from mlxcache.errors import ConfigError
from mlxcache.model.examine import examine
from mlxcache.model.load import ModelSpec
from mlxcache.plan.cache import Memory
from mlxcache.plan.disk import UNLIMITED
from mlxcache.plan.simulate import Simulation, Speed
from mlxcache.plan.trace import Request, Trace

SPEED = Speed(prefill=1000, decode=50)
"""Speeds that decide which user's turn comes next; all servers get the same order."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace, and the limits of the servers to which it is replayed.

    `users`: number of sessions open at once, for traces whose turns have no times of their own but
    follow the turn before.
    `ram` and `disk`: limits in bytes; only mlxcache uses `disk`.
    """

    trace: Trace
    users: int
    ram: int
    disk: int

    def order(self, model: Path) -> list[Request]:
        """Return the requests of the trace in the order in which every server gets them.

        The order results from a simulation of mlxcache with the model in the folder `model`. Raises
        ConfigError for a trace without requests, or with longer ones than the model takes.
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
        return list(simulation.run(self.trace, self.users).order)

    def launches(self, folder: Path, others: Iterable[Launch]) -> Iterator[Launch]:
        """Yield how to start each server: mlxcache with its disk and without, then `others`.

        The cache folders of mlxcache are made in `folder`. In the commands of `others`, {ram_mb} is
        replaced by the limit of RAM in MB. A command with the argument `mlx_lm` gets that limit in
        bytes, as --prompt-cache-bytes.
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


@dataclass(frozen=True, slots=True)
class Played:
    """Result of replaying a trace at one server.

    `replies`: those of all requests in order. `prompt_tokens` and `cached_tokens`: sums of what the
    server reported; `cached_tokens` is None if it reported none. `peak_bytes`: maximum memory of
    its process and its children.
    """

    replies: tuple[Reply, ...]
    peak_bytes: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(one.prompt_tokens or 0 for one in self.replies)

    @property
    def cached_tokens(self) -> int | None:
        """Reused tokens of all prompts; None if the server reports none."""
        if all(one.cached_tokens is None for one in self.replies):
            return None
        return sum(one.cached_tokens or 0 for one in self.replies)

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that were reused; None if the server reports none."""
        if self.cached_tokens is None:
            return None
        return self.cached_tokens / max(1, self.prompt_tokens)

    def first_token_s(self) -> tuple[float, float]:
        """Return the median and the 95th percentile of the times to the first token, in seconds."""
        times = sorted(one.first_s for one in self.replies)
        if len(times) < 2:
            return times[0], times[0]
        cuts = quantiles(times, n=20, method="inclusive")
        return cuts[9], cuts[18]

    def as_object(self) -> dict[str, Any]:
        """Return the figures as an object for JSON.

        Keys: `requests`, `prompt_tokens`, `cached_tokens`, `fed_tokens`, `hit_rate`,
        `first_token_s` (`p50` and `p95`, in seconds), `generated_tokens` and `peak_bytes`.
        `cached_tokens`, `fed_tokens` and `hit_rate` are None if the server reports no cached
        tokens.
        """
        median, late = self.first_token_s()
        cached = self.cached_tokens
        return {
            "requests": len(self.replies),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": cached,
            "fed_tokens": None if cached is None else self.prompt_tokens - cached,
            "hit_rate": self.hit_rate,
            "first_token_s": {"p50": median, "p95": late},
            "generated_tokens": sum(one.generated_tokens for one in self.replies),
            "peak_bytes": self.peak_bytes,
        }


class Player:
    """Client that replays one trace at one server.

    `filler`: generates text for the server's model. `seed`: the text is generated from it, and
    different seeds share no text.
    """

    def __init__(self, client: Client, filler: Filler, seed: str = "trace"):
        self._client = client
        self._filler = filler
        self._seed = seed
        self._said: dict[int, str] = {}

    def play(
        self, requests: Iterable[Request], on_reply: Callable[[int], None] = lambda done: None
    ) -> Played:
        """Send `requests` one after another and return the replies; `peak_bytes` is left at 0.

        `on_reply(done)` is called after each reply with the number of replies so far. Blocks.
        Raises Refused.
        """
        replies: list[Reply] = []
        for one in requests:
            reply = self._client.chat(self.messages(one), max(1, one.reply_tokens))
            said = (reply.text, *("" for _ in one.ids))
            reply_parts = one.ids[one.prompt_parts :].tolist()
            self._said |= dict(zip(reply_parts, said, strict=False))
            replies.append(reply)
            on_reply(len(replies))
        return Played(tuple(replies))

    def messages(self, request: Request) -> list[dict[str, str]]:
        """Return the messages of a request's prompt, each with `role` and `content`.

        Parts that are earlier replies have the text that the server replied; others have filler
        text in the role `user`.
        """
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


def replay(
    plan: Replay,
    model: Path,
    folder: Path,
    others: Iterable[Launch],
    *,
    wait_s: float,
    status: Callable[[str], None],
) -> dict[str, Played]:
    """Replay a trace at each server in turn; return the results by the server's name.

    `plan`: the trace and the limits of the servers. `model`: the model's folder. `folder`: for the
    servers' caches and logs. `others`: how to start servers other than mlxcache. One server runs at
    a time. `wait_s`: seconds that a server has to start. `status` is called with a text at each
    step. Raises Refused if a server refuses a request, and NotStarted if it does not start.
    """
    order, filler = plan.order(model), Filler(model)
    found: dict[str, Played] = {}
    for launch in plan.launches(folder, others):
        with running(launch, model, folder, wait_s) as server:

            def on_reply(done: int, name: str = launch.name) -> None:
                status(f"{name}: {done} of {len(order)} requests")

            found[launch.name] = Player(server.client, filler).play(order, on_reply)
            found[launch.name] = replace(found[launch.name], peak_bytes=server.peak_bytes)
    return found


def show(console: Console, plan: Replay, found: Mapping[str, Played]) -> None:
    """Print a table with a row for each server. `found`: results by the server's name."""
    console.print(
        f"\nA trace of {len(plan.trace.requests):,} requests ({plan.trace.form}), "
        f"{format_size(plan.ram)} of RAM each",
        style="bold",
        markup=False,
    )
    columns = ("server", "fed, of prompt tokens", "reused", "first token p50", "p95", "peak memory")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, heading in enumerate(columns):
        table.add_column(heading, justify="right" if at else "left")
    for name, one in found.items():
        table.add_row(name, *_row(one))
    console.print(table)


def _row(one: Played) -> Sequence[str]:
    median, late = one.first_token_s()
    rate, cached = one.hit_rate, one.cached_tokens
    fed = "-" if cached is None else f"{one.prompt_tokens - cached:,}"
    return (
        f"{fed} of {one.prompt_tokens:,}",
        "-" if rate is None else f"{rate:.1%}",
        f"{median:.2f} s",
        f"{late:.2f} s",
        format_size(one.peak_bytes) if one.peak_bytes else "-",
    )
