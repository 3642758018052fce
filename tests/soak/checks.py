"""Checks of idle servers from outside: by HTTP, by their files, and by their processes."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from mlxcache.config.memory import read_footprint
from tests.proofs import crash
from tests.soak import wire
from tests.soak.ledger import Ledger, Sample, SessionTracker
from tests.soak.reference import Reference
from tests.soak.server import SLACK_BYTES, SLACK_SHARE, IdleUsage, SoakServer

REST_S = 120.0
"""Timeout for running requests and pending writes to end."""

RUNNING = ("queued", "prefill", "decode")
MAX_REPLIES, MAX_TOKENS = 14, 12_000
"""Replies of a round to compare with the reference, and the prompt tokens to stop after."""

KV_BYTES, LINEAR, SPARE_BYTES = 2048, 1.5, 32 << 20
"""Bytes of KV per token of the tiny models; factor and bytes allowed on disk beyond that."""

MORE_FILES, MORE_THREADS = 40, 24
"""Allowed increase of file descriptors and threads after a server's first round."""

MORE_BYTES, MORE_SHARE = 48 << 20, 0.15
"""Allowed increase of memory after a quarter of the time: the larger of the two."""


def get_json(server: SoakServer, path: str, ledger: Ledger) -> Any:
    """Return the JSON at `path`; on failure record a violation and return None."""
    out = wire.call(server.port, "GET", path)
    if out.status == 200:
        return json.loads(out.body)
    kind = "hang" if out.timed_out else "error"
    ledger.add_violation(kind, f"{server.name}: GET {path} at rest: {out.status} {out.error}")
    return None


def wait_at_rest(server: SoakServer, ledger: Ledger) -> bool:
    """Wait until no request runs and no write is pending; False after a timeout or an error."""
    end, running, pending, quiet = time.monotonic() + REST_S, [], 0, 0
    while time.monotonic() < end:
        records = get_json(server, "/v1/requests?limit=1000", ledger)
        cache = get_json(server, "/v1/cache", ledger)
        if records is None or cache is None:
            return False
        running = [one for one in records["data"] if one["status"] in RUNNING]
        pending = cache["pending_bytes"]
        quiet = 0 if running or pending else quiet + 1
        if quiet > 1:
            return True
        time.sleep(0.3)
    words = (
        f"{len(running)} requests run and {pending} bytes are pending "
        f"{REST_S:.0f} s after the last request: {running[:2]}"
    )
    ledger.add_violation("hang", f"{server.name}: {words}")
    return False


def check_counts(server: SoakServer, ledger: Ledger) -> None:
    """Check each request: cached + fed = prompt, restored <= cached, at least one token fed.

    No more is lost than was fed, in no more time than that took.
    """
    found = get_json(server, "/v1/requests?limit=1000", ledger)
    for one in found["data"] if found else ():
        prompt, cached, fed = one["prompt_tokens"], one["cached_tokens"], one["fed_tokens"]
        right = cached + fed == prompt if one["status"] == "done" else cached + fed <= prompt
        if not right or not 0 <= one["restored_tokens"] <= cached or cached >= max(1, prompt):
            ledger.add_violation("counts", f"{server.name}: {one}")
        lost, took = one["lost"], one["timing"]["prefill_s"]
        if lost and (lost["lost_tokens"] > fed or lost["lost_s"] > (took or 0.0) + 1e-6):
            ledger.add_violation("losses", f"{server.name}: {one}")


def check_budget(server: SoakServer, ledger: Ledger) -> None:
    found = get_json(server, "/v1/cache", ledger)
    figures = server.figures
    if found is None:
        return
    limit = found["ram"]["limit_bytes"]
    most = max(figures.taken, figures.high_water, found["ram"]["high_water_bytes"])
    if most > limit:
        ledger.add_violation("budget", f"{server.name}: {most} bytes of {limit} were taken")
    if server.figures.polls:
        check_overshoot(server, ledger)


def check_overshoot(server: SoakServer, ledger: Ledger) -> None:
    """Check the peak memory of the process, sampled 20 times a second from the system."""
    over = server.overshoot()
    ledger.overshoots.append(over)
    if over.nbytes > max(
        SLACK_BYTES, SLACK_SHARE * over.nbytes / over.share if over.share > 0 else 0
    ):
        words = f"{over.of} took {over.nbytes} bytes beyond weights, budget and its idle memory"
        ledger.add_violation("overshoot", words)


def check_sessions(server: SoakServer, sessions: SessionTracker, ledger: Ledger) -> None:
    known = sessions.expected()
    found = get_json(server, "/v1/sessions?limit=100000", ledger)
    if found is None:
        return
    gone, short = sessions.missing(known, found["data"])
    if gone or short:  # a listing is not atomic: only what a second one confirms counts
        time.sleep(0.5)
        again = get_json(server, "/v1/sessions?limit=100000", ledger)
        gone, short = sessions.missing(known, again["data"] if again else found["data"])
    for sentence in gone:
        ledger.add_violation("session lost", f"{server.name}: {sentence}")
    for sentence in short:
        ledger.add_violation("durable lost", f"{server.name}: {sentence}")
    if gone or short:
        sessions.clear()  # report each loss once


def check_files(folder: Path, ledger: Ledger) -> None:
    for sentence in crash.look(folder / "store", crash.Seen()):
        ledger.add_violation("files", f"{folder.name}: {sentence}")


def verify_files(server: SoakServer, ledger: Ledger) -> None:
    found = get_json(server, "/v1/cache/check", ledger)
    for problem in found["data"] if found else ():
        ledger.add_violation("files", f"{server.name}: {problem}")


def check_disk_limit(server: SoakServer, ledger: Ledger, limit: int) -> None:
    if server.figures.disk > limit:
        ledger.add_violation("disk", f"{server.name}: {server.figures.disk} bytes under {limit}")


def check_growth(server: SoakServer, ledger: Ledger) -> None:
    """Check that bytes on disk grow with the computed tokens, not with the turns."""
    found = get_json(server, "/v1/cache", ledger)
    tokens = ledger.checks["computed"]
    most = int(LINEAR * KV_BYTES * tokens) + SPARE_BYTES
    if found and found["disk"]["used_bytes"] > most:
        words = f"{found['disk']['used_bytes']} bytes on disk for {tokens} tokens"
        ledger.add_violation("growth", f"{server.name}: {words}")


def measure_idle(server: SoakServer, began: float) -> IdleUsage:
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    held = process.num_fds(), process.num_threads()
    return IdleUsage(time.monotonic() - began, read_footprint(server.process.pid), *held)


def first_after_quarter(rests: Sequence[IdleUsage]) -> IdleUsage:
    return next(rest for rest in rests if rest.at >= rests[-1].at / 4)


def check_leaks(name: str, rests: Sequence[IdleUsage], ledger: Ledger) -> None:
    """Check that memory does not grow after a quarter, nor files and threads after a round."""
    if len(rests) < 3:
        return
    first, last = rests[0], rests[-1]
    if last.files > first.files + MORE_FILES:
        ledger.add_violation("leak", f"{name}: {first.files} file descriptors became {last.files}")
    if last.threads > first.threads + MORE_THREADS:
        ledger.add_violation("leak", f"{name}: {first.threads} threads became {last.threads}")
    quarter = first_after_quarter(rests)
    if last.nbytes > quarter.nbytes + max(MORE_BYTES, MORE_SHARE * quarter.nbytes):
        ledger.add_violation("leak", f"{name}: {quarter.nbytes} bytes became {last.nbytes}")


def check_tokens(
    samples: Sequence[Sample],
    references: Mapping[str, Reference],
    rng: random.Random,
    ledger: Ledger,
) -> None:
    """Compare replies with the reference: contradicting ones first, then a random choice."""
    same: defaultdict[tuple[str, str], list[Sample]] = defaultdict(list)
    for one in samples:
        same[one.family, json.dumps(one.request.messages)].append(one)
    odd = [one for group in same.values() if contradict(group) for one in group]
    warm = [one for one in samples if one.out.cached]
    chosen = rng.sample(warm, min(MAX_REPLIES, len(warm)))
    chosen += rng.sample(samples, min(MAX_REPLIES // 3, len(samples)))
    left = MAX_TOKENS
    for one in [*odd, *chosen]:
        if left < 0:
            break
        request, out = one.request, one.out
        left -= out.prompt
        found = references[one.family].check(request.messages, out.text, out.prompt)
        ledger.count(ledger.checks, "checked")
        if found:
            words = f"{one.family}, {request.label}, {out.request_id}, {out.cached} cached: {found}"
            ledger.add_violation("wrong tokens", words)


def contradict(group: Sequence[Sample]) -> bool:
    """Return True if one of the replies to the same messages is not a prefix of another."""
    longest = max((one.out.text for one in group), key=len)
    return not all(longest.startswith(one.out.text) for one in group)
