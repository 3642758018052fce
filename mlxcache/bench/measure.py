"""Interleaved measurement: in each repetition, every server runs the same scenario in turn."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from mlxcache.bench.client import Client, Refused, Reply
from mlxcache.bench.findings import Check, by, middle
from mlxcache.bench.own_time import OwnTime
from mlxcache.bench.process import OURS, THEIRS, NotStarted, Server
from mlxcache.bench.turns import AGAIN, SCENARIOS, Outcome, Visit, restart

SETTLE_S = 0.05
"""Pause in seconds between two servers, so that writes of one do not slow down the other."""

RESTART = "restart"

FIRST_TOKEN, OWN_TIME, THROUGHPUT = 1.05, 1.10, 1.0
OVERHEAD_S = 0.030

LONG_S, SOONER = 10.0, 20.0
"""Seconds of a cold first token, and how many times sooner it must come after a restart.

The bound is checked if the cold one takes at least LONG_S seconds."""

Figures = dict[str, float | None]
"""Figures of one run of a scenario at one server, by name; None for those that are not known."""


class Samples(dict[str, list[Figures]]):
    def medians(self, server: str) -> Figures:
        taken = self.get(server, [])
        return {name: middle(one[name] for one in taken) for name in (taken[0] if taken else ())}

    def ratio(self, figure: str, server: str) -> float | None:
        """Return the median over repetitions of this server's `figure` divided by that of `server`.

        Both are measured within seconds, so that a change of the machine's speed during the run has
        no effect. Returns None if no repetition can be compared.
        """
        pairs = zip(self.get(OURS, ()), self.get(server, ()), strict=False)
        return middle(by(mine[figure], other[figure]) for mine, other in pairs)


@dataclass(slots=True)
class Results:
    """Samples by scenario, failures as text, and details of warm turns.

    `pairs` compares warm turns of this server with mlx-lm alone (`server_s` and `own_s`: seconds to
    the first token for the same tokens), which also measured `kv_bytes_per_token`. `timings` has
    the seconds of each part of a warm turn, as this server recorded them.
    """

    samples: dict[str, Samples] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    pairs: list[dict[str, float]] = field(default_factory=list)
    timings: list[Mapping[str, float | None]] = field(default_factory=list)
    kv_bytes_per_token: float | None = None

    def ratio(self, scenario: str, figure: str, server: str) -> float | None:
        return self.samples.get(scenario, Samples()).ratio(figure, server)


def figures_of(outcome: Outcome) -> Figures:
    """Return the figures of one run of a scenario; times are in seconds.

    `first_s` is the time to the first text, the mean of all replies, and `wall_s` the time of the
    scenario. `rate` is the tokens per second of a reply after its first token, the median of all
    replies. `throughput` is `generated_tokens`, the sum of all replies, per second of `wall_s`. The
    counts of a prompt are means, and None if the server did not report them for every reply.
    """
    replies = outcome.replies
    generated = sum(reply.generated_tokens for reply in replies)
    return {
        "first_s": sum(reply.first_s for reply in replies) / len(replies),
        "wall_s": outcome.wall_s,
        "rate": middle(reply.decode_rate for reply in replies),
        "throughput": generated / outcome.wall_s,
        "prompt_tokens": _mean([reply.prompt_tokens for reply in replies]),
        "cached_tokens": _mean([reply.cached_tokens for reply in replies]),
        "generated_tokens": generated,
        "fed_tokens": _mean([reply.fed_tokens for reply in replies]),
    }


def _mean(counts: Sequence[int | None]) -> float | None:
    known = [count for count in counts if count is not None]
    return sum(known) / len(known) if len(known) == len(counts) else None


def restart_figures(outcome: Outcome, client: Client) -> Figures:
    """Return the figures of three turns: cold, warm, and one after kill -9 and a new start.

    The times are seconds until the first text, `again_s` that of the third turn; `sooner` is
    `cold_s` / `again_s`. Counts are those of the third turn, None if the server reports none:
    `restored_tokens` came from disk, and `lost_tokens` is the number of tokens of the cold turn and
    its reply whose KV was computed, less `cached_tokens`: 0 or less if all were still cached.
    """
    cold, warm, again = outcome.replies
    cached = again.cached_tokens
    return {
        "cold_s": cold.first_s,
        "warm_s": warm.first_s,
        "again_s": again.first_s,
        "prompt_tokens": again.prompt_tokens,
        "cached_tokens": cached,
        "restored_tokens": _restored(client, again),
        "lost_tokens": None if cached is None else cold.conversation_tokens - cached,
        "sooner": by(cold.first_s, again.first_s),
    }


def _restored(client: Client, reply: Reply) -> int | None:
    """Fetch the restored tokens of a reply's request, which only mlxcache reports."""
    if reply.request is None:
        return None
    with contextlib.suppress(Refused):
        record: Mapping[str, Any] = client.get(f"/v1/requests/{reply.request}")
        return record.get("restored_tokens")
    return None


@dataclass(frozen=True, slots=True)
class Plan:
    """Scenarios to run, by name, and how often: `runs` repetitions at each server.

    `visit(server, run)` makes the conversations of repetition `run` at one server. `on_step` is
    called with a text before each scenario. With `keep`, all repetitions share one visit:
    conversations continue, and scenarios that begin one are run only once. This saves most of the
    time if prompts are long.
    """

    scenarios: Sequence[str]
    runs: int
    visit: Callable[[Server, int], Visit]
    on_step: Callable[[str], None]
    keep: bool = False

    def play(
        self, servers: Sequence[Server], take: Callable[[str, Server, Visit], None]
    ) -> list[str]:
        """Call `take(scenario, server, visit)` in turn; return failures as text. Blocks.

        The order of the servers rotates. One that fails in a scenario skips it from then on.
        """
        failures: list[str] = []
        out: set[tuple[str, str]] = set()
        visits: dict[tuple[str, int], Visit] = {}
        for run, name, at in product(range(self.runs), self.scenarios, range(len(servers))):
            server = servers[(run + at) % len(servers)]
            again = self.keep and run > 0
            if (again and name not in AGAIN) or (name, server.name) in out:
                continue
            self.on_step(f"{run + 1}/{self.runs} {name} {server.name}")
            time.sleep(SETTLE_S)
            key = (server.name, 0 if self.keep else run)
            try:
                if key not in visits:
                    visits[key] = self.visit(server, key[1])
                take(name, server, visits[key])
            except (Refused, NotStarted) as error:
                out.add((name, server.name))
                failures.append(f"{server.name}, {name}: {error}")
        return failures


def measure(plan: Plan, servers: Sequence[Server], own: OwnTime | None = None) -> Results:
    """Run the scenarios of `plan` at all `servers` and return the results. Blocks.

    `own`, if not None, measures the turns of this server's scenario `warm` again with mlx-lm alone.
    """
    results = Results({
        name: Samples({server.name: [] for server in servers}) for name in plan.scenarios
    })  # fmt: skip

    def take(name: str, server: Server, visit: Visit) -> None:
        if name == RESTART:
            taken = restart_figures(restart(visit), server.client)
            results.samples[name][server.name].append(taken)
            return
        outcome = SCENARIOS[name](visit)
        results.samples[name][server.name].append(figures_of(outcome))
        if name == "warm" and server.name == OURS:
            reply = outcome.replies[0]
            record: dict[str, Any] = server.client.get(f"/v1/requests/{reply.request}")
            results.timings.append(dict(record["timing"]))
            if own is not None and reply.prompt_tokens and reply.cached_tokens:
                fed = reply.prompt_tokens - reply.cached_tokens
                seconds, results.kv_bytes_per_token = own.ask(reply.cached_tokens, fed)
                counts = {"prompt_tokens": reply.prompt_tokens, "fed_tokens": fed}
                results.pairs.append({"server_s": reply.first_s, "own_s": seconds, **counts})

    results.failures += plan.play(servers, take)
    return results


# -- bounds ----------------------------------------------------------------------------------------


def speed_checks(results: Results, others: Sequence[str]) -> Iterator[Check]:
    """Yield the bounds on this server's speed, some of them relative to the servers `others`.

    No scenario may have failed. A bound is left out if `results` lacks a figure for it.
    """
    yield Check("scenarios that failed here", _failed(results.failures), 0)
    for other in others:
        ratio = results.ratio("warm", "first_s", other)
        if ratio is not None:
            yield Check(f"warm first token, by that of {other}", ratio, FIRST_TOKEN)
    cold = [results.ratio("cold", "first_s", other) for other in others]
    worst = max((ratio for ratio in cold if ratio is not None), default=None)
    if worst is not None:
        yield Check("cold first token, by the best of the others", worst, FIRST_TOKEN)
    ratio = results.ratio("concurrent", "throughput", THEIRS)
    if ratio is not None:
        name = f"tokens/s of eight at once, by {THEIRS}'s"
        yield Check(name, ratio, THROUGHPUT, least=True)
    share = middle(by(pair["server_s"], pair["own_s"]) for pair in results.pairs)
    over = middle(pair["server_s"] - pair["own_s"] for pair in results.pairs)
    if share is not None and over is not None:
        yield Check("warm first token, by the model's own time", share, OWN_TIME)
        yield Check("warm first token, less the model's own time", over, OVERHEAD_S, "s")


def restart_checks(results: Results) -> Iterator[Check]:
    yield Check("restarts that failed here", _failed(results.failures), 0)
    rounds = results.samples[RESTART]
    mine = rounds.medians(OURS)
    lost = max((one["lost_tokens"] or 0 for one in rounds.get(OURS, ())), default=0)
    yield Check("tokens of the turn before the last that a kill cost", lost, 0)
    sooner = mine.get("sooner")
    if (mine.get("cold_s") or 0) >= LONG_S and sooner is not None:
        name = "first token after a restart, times sooner than cold"
        yield Check(name, sooner, SOONER, least=True)


def _failed(failures: Sequence[str]) -> int:
    return sum(failure.startswith(f"{OURS},") for failure in failures)
