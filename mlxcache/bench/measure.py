"""Interleaved measurement: in each repetition, every server runs the same scenario in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from mlxcache.bench.client import Refused, Reply
from mlxcache.bench.own import OwnTime
from mlxcache.bench.process import OURS, Server
from mlxcache.bench.scenarios import AGAIN, SCENARIOS, Outcome, Visit

SETTLE_S = 0.05
"""Pause in seconds between two servers, so that writes of one do not slow down the other."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Figures of one run of a scenario at one server; times are in seconds.

    `first_s` is the time to the first text, the mean of all replies, and `wall_s` the time of the
    scenario. `rate` is the tokens per second of a reply after its first token, the median of all
    replies. `throughput` is `generated_tokens`, the sum of all replies, per second of `wall_s`. The
    counts of a prompt are means, and None if the server did not report them for every reply;
    `fed_tokens` were not cached.
    """

    first_s: float
    wall_s: float
    rate: float | None
    throughput: float
    prompt_tokens: float | None
    cached_tokens: float | None
    generated_tokens: int
    fed_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds to the first token of a warm turn, here and with mlx-lm alone for the same tokens.

    `server_s` is this server's time and `own_s` that of mlx-lm without a server. `fed_tokens` of
    the `prompt_tokens` were not cached.
    """

    server_s: float
    own_s: float
    prompt_tokens: int
    fed_tokens: int


@dataclass(slots=True)
class Results:
    """Samples by scenario and server, failures as text, and details of warm turns.

    `pairs` compares warm turns of this server with mlx-lm alone, which also measured
    `kv_bytes_per_token`. `timings` holds the times that this server recorded for each warm turn, as
    `timing` returns them.
    """

    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    timings: list[Mapping[str, float | None]] = field(default_factory=list)
    kv_bytes_per_token: float | None = None

    def medians(self, scenario: str, server: str) -> dict[str, float | None]:
        """Return the median over repetitions of each field of `Sample`, by the field's name.

        A median is None if no sample has the figure. Returns {} if no sample was taken.
        """
        taken = self.samples.get(scenario, {}).get(server, [])
        names = Sample.__dataclass_fields__ if taken else ()
        return {name: middle(getattr(sample, name) for sample in taken) for name in names}

    def ratio(self, scenario: str, figure: str, server: str) -> float | None:
        """Return the median over repetitions of this server's `figure` divided by that of `server`.

        `figure` is the name of a field of `Sample`. Both figures of a ratio are measured within
        seconds, so that a change of the machine's speed during the run has no effect. Returns None
        if no repetition can be compared.
        """
        taken = self.samples.get(scenario, {})
        pairs = zip(taken.get(OURS, ()), taken.get(server, ()), strict=False)
        return middle(by(getattr(mine, figure), getattr(other, figure)) for mine, other in pairs)


def middle(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None, or None if there are none."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def by(mine: float | None, other: float | None) -> float | None:
    """Return the ratio `mine` / `other`, or None if one is None or `other` is 0."""
    return mine / other if mine is not None and other else None


def sample(outcome: Outcome) -> Sample:
    """Return the figures of one run of a scenario, from its replies and its time."""
    replies = outcome.replies
    generated = sum(reply.generated_tokens for reply in replies)
    return Sample(
        first_s=sum(reply.first_s for reply in replies) / len(replies),
        wall_s=outcome.wall_s,
        rate=middle(reply.decode_rate for reply in replies),
        throughput=generated / outcome.wall_s,
        prompt_tokens=_mean([reply.prompt_tokens for reply in replies]),
        cached_tokens=_mean([reply.cached_tokens for reply in replies]),
        generated_tokens=generated,
        fed_tokens=_mean([reply.fed_tokens for reply in replies]),
    )


def _mean(counts: Sequence[int | None]) -> float | None:
    known = [count for count in counts if count is not None]
    return sum(known) / len(known) if len(known) == len(counts) else None


@dataclass(frozen=True, slots=True)
class Plan:
    """Scenarios to run, by name, and how often: `runs` repetitions at each server.

    `visit(server, run)` makes a `Visit`: the conversations of repetition `run` at one server.
    `on_step` is called with a text before each scenario. With `keep`, all repetitions share one
    visit: conversations continue, and scenarios that begin one are run only once. This saves most
    of the time if prompts are long.
    """

    scenarios: Sequence[str]
    runs: int
    visit: Callable[[Server, int], Visit]
    on_step: Callable[[str], None]
    keep: bool = False

    def visits(self, servers: Sequence[Server], run: int) -> dict[str, Visit]:
        """Return new conversations for repetition `run` at each server, by the server's name."""
        return {server.name: self.visit(server, run) for server in servers}

    def due(self, run: int) -> Sequence[str]:
        """Return the names of the scenarios that repetition `run`, counted from 0, runs."""
        once = self.keep and run > 0
        return [name for name in self.scenarios if not once or name in AGAIN]


def play(servers: Sequence[Server], plan: Plan, own: OwnTime | None) -> Results:
    """Run the scenarios of `plan` at all `servers` and return the results. Blocks.

    The order of the servers rotates with each repetition. A server that fails in a scenario skips
    it in later repetitions. `own`, if not None, measures the turns of this server's scenario `warm`
    again with mlx-lm alone.
    """
    results = Results({name: {server.name: [] for server in servers} for name in plan.scenarios})
    out: set[tuple[str, str]] = set()
    visits = plan.visits(servers, 0)
    for run in range(plan.runs):
        if run and not plan.keep:
            visits = plan.visits(servers, run)
        for name in plan.due(run):
            for server in _rotated(servers, run):
                if (name, server.name) in out:
                    continue
                plan.on_step(f"{run + 1}/{plan.runs} {name} {server.name}")
                time.sleep(SETTLE_S)
                try:
                    _play_one(name, server, visits[server.name], own, results)
                except Refused as refused:
                    out.add((name, server.name))
                    results.failures.append(f"{server.name}, {name}: {refused}")
    return results


def _rotated(servers: Sequence[Server], by: int) -> list[Server]:
    at = by % len(servers)
    return [*servers[at:], *servers[:at]]


def _play_one(
    name: str, server: Server, visit: Visit, own: OwnTime | None, results: Results
) -> None:
    outcome = SCENARIOS[name](visit)
    results.samples[name][server.name].append(sample(outcome))
    if name == "warm" and server.name == OURS:
        reply = outcome.replies[0]
        results.timings.append(timing(server, reply))
        if own is not None and reply.prompt_tokens and reply.cached_tokens:
            fed = reply.prompt_tokens - reply.cached_tokens
            seconds, results.kv_bytes_per_token = own.ask(reply.cached_tokens, fed)
            results.pairs.append(Pair(reply.first_s, seconds, reply.prompt_tokens, fed))


def timing(server: Server, reply: Reply) -> Mapping[str, float | None]:
    """Fetch the times that this server recorded for the request of `reply`.

    They are the seconds of each part of the request, by the part's name, from the field `timing` of
    `GET /v1/requests/ID`. Raises Refused.
    """
    record: dict[str, Any] = server.client.get(f"/v1/requests/{reply.request}")
    return dict(record["timing"])
