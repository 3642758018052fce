"""What must hold once nothing runs: looked at from outside, by HTTP, files and the process."""

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
from tests.soak.ledger import Ledger, Sample, Sessions
from tests.soak.reference import Reference
from tests.soak.server import ROOM, ROOM_SHARE, Life, Rest

REST_S = 120.0
"""In which whatever runs or is being written must be over."""

RUNNING = ("queued", "prefill", "decode")
LOOKED_AT, LOOKED_TOKENS = 14, 12_000
"""Replies of each round that the reference looks at, and the tokens after which it is enough."""

KV_BYTES, LINEAR, SPARE_BYTES = 2048, 1.5, 32 << 20
"""A token's KV in the tiny models, and how much more its files may take: states, and rounding."""

MORE_FILES, MORE_THREADS = 40, 24
"""By how many a server that has gone on for long may exceed what it had after its first round."""

MORE_BYTES, MORE_SHARE = 48 << 20, 0.15
"""By how much memory at the end may exceed that at a quarter of the time."""


def read(life: Life, path: str, ledger: Ledger) -> Any:
    """The JSON at `path`, None where it is not to be had, which is a violation."""
    out = wire.call(life.port, "GET", path)
    if out.status == 200:
        return json.loads(out.body)
    kind = "hang" if out.hang else "error"
    ledger.violation(kind, f"{life.name}: GET {path} at rest: {out.status} {out.error}")
    return None


def at_rest(life: Life, ledger: Ledger) -> bool:
    """Wait until nothing runs and nothing is to be written."""
    end, running, pending, quiet = time.monotonic() + REST_S, [], 0, 0
    while time.monotonic() < end:
        records = read(life, "/v1/requests?limit=1000", ledger)
        cache = read(life, "/v1/cache", ledger)
        if records is None or cache is None:
            return False
        running = [one for one in records["data"] if one["status"] in RUNNING]
        pending = cache["pending_bytes"]
        quiet = 0 if running or pending else quiet + 1
        if quiet > 1:
            return True
        time.sleep(0.3)
    ledger.violation("hang", f"{life.name}: {len(running)} requests run, {pending} bytes wait, "
                     f"{REST_S:.0f} s after the last was asked: {running[:2]}")  # fmt: skip
    return False


def counts(life: Life, ledger: Ledger) -> None:
    """Each request: cached + fed = prompt, restored is a part of cached, at least one was fed."""
    found = read(life, "/v1/requests?limit=1000", ledger)
    for one in found["data"] if found else ():
        prompt, cached, fed = one["prompt_tokens"], one["cached_tokens"], one["fed_tokens"]
        right = cached + fed == prompt if one["status"] == "done" else cached + fed <= prompt
        if not right or not 0 <= one["restored_tokens"] <= cached or cached >= max(1, prompt):
            ledger.violation("counts", f"{life.name}: {one}")


def budget(life: Life, ledger: Ledger) -> None:
    """What was reserved and what was held at any moment, and what the process took."""
    found = read(life, "/v1/cache", ledger)
    figures = life.figures
    if found is None:
        return
    limit = found["ram"]["limit_bytes"]
    most = max(figures.taken, figures.high_water, found["ram"]["high_water_bytes"])
    if most > limit:
        ledger.violation("budget", f"{life.name}: {most} bytes of {limit} were taken")
    if life.figures.looks:
        took_too_much(life, ledger)


def took_too_much(life: Life, ledger: Ledger) -> None:
    """What the process took, as the operating system counts it, 20 times a second."""
    over = life.overshoot()
    ledger.overshoots.append(over)
    if over.nbytes > max(ROOM, ROOM_SHARE * over.nbytes / over.share if over.share > 0 else 0):
        words = f"{over.of} took {over.nbytes} bytes more than weights, budget and its own"
        ledger.violation("overshoot", words)


def kept(life: Life, sessions: Sessions, ledger: Ledger) -> None:
    """No session is lost, and what was durable is."""
    known = sessions.known()
    found = read(life, "/v1/sessions?limit=100000", ledger)
    if found is None:
        return
    gone, short = sessions.missing(known, found["data"])
    if gone or short:  # one listing is not one look at the table: only what stays so counts
        time.sleep(0.5)
        again = read(life, "/v1/sessions?limit=100000", ledger)
        gone, short = sessions.missing(known, again["data"] if again else found["data"])
    for sentence in gone:
        ledger.violation("session lost", f"{life.name}: {sentence}")
    for sentence in short:
        ledger.violation("durable lost", f"{life.name}: {sentence}")
    if gone or short:
        sessions.clear()  # told once


def files(folder: Path, ledger: Ledger) -> None:
    """The folder as another process sees it that opens it beside those that run."""
    for sentence in crash.look(folder / "store", crash.Seen()):
        ledger.violation("files", f"{folder.name}: {sentence}")


def clean(life: Life, ledger: Ledger) -> None:
    """`cache check` finds nothing."""
    found = read(life, "/v1/cache/check", ledger)
    for problem in found["data"] if found else ():
        ledger.violation("files", f"{life.name}: {problem}")


def capped(life: Life, ledger: Ledger, limit: int) -> None:
    """A folder under a small cap takes no more than that."""
    if life.figures.disk > limit:
        ledger.violation("disk", f"{life.name}: {life.figures.disk} bytes under {limit}")


def linear(life: Life, ledger: Ledger) -> None:
    """The shared folder grows with the tokens that were computed, and not with turns."""
    found = read(life, "/v1/cache", ledger)
    most = int(LINEAR * KV_BYTES * ledger.computed) + SPARE_BYTES
    if found and found["disk"]["used_bytes"] > most:
        words = f"{found['disk']['used_bytes']} bytes on disk for {ledger.computed} tokens"
        ledger.violation("growth", f"{life.name}: {words}")


def rest(life: Life, began: float) -> Rest:
    """What the process holds now."""
    assert life.server is not None
    process = psutil.Process(life.server.pid)
    held = process.num_fds(), process.num_threads()
    return Rest(time.monotonic() - began, read_footprint(life.server.pid), *held)


def at_a_quarter(rests: Sequence[Rest]) -> Rest:
    """The first look from a quarter of the time on."""
    return next(rest for rest in rests if rest.at >= rests[-1].at / 4)


def leaks(name: str, rests: Sequence[Rest], ledger: Ledger) -> None:
    """Nothing grows from a quarter of the time on, nor files and threads from the first round."""
    if len(rests) < 3:
        return
    first, last = rests[0], rests[-1]
    if last.files > first.files + MORE_FILES:
        ledger.violation("leak", f"{name}: {first.files} file descriptors became {last.files}")
    if last.threads > first.threads + MORE_THREADS:
        ledger.violation("leak", f"{name}: {first.threads} threads became {last.threads}")
    quarter = at_a_quarter(rests)
    if last.nbytes > quarter.nbytes + max(MORE_BYTES, MORE_SHARE * quarter.nbytes):
        ledger.violation("leak", f"{name}: {quarter.nbytes} bytes became {last.nbytes}")


def tokens(
    samples: Sequence[Sample],
    references: Mapping[str, Reference],
    rng: random.Random,
    ledger: Ledger,
) -> None:
    """Some replies are what the model itself says, those before all that were given differently."""
    same: defaultdict[tuple[str, str], list[Sample]] = defaultdict(list)
    for one in samples:
        same[one.family, json.dumps(one.asked.messages)].append(one)
    odd = [one for group in same.values() if _differ(group) for one in group]
    warm = [one for one in samples if one.out.cached]
    chosen = rng.sample(warm, min(LOOKED_AT, len(warm)))
    chosen += rng.sample(samples, min(LOOKED_AT // 3, len(samples)))
    left = LOOKED_TOKENS
    for one in [*odd, *chosen]:
        if left < 0:
            break
        asked, out = one.asked, one.out
        left -= out.prompt
        found = references[one.family].wrong(asked.messages, out.text, out.prompt)
        ledger.checked += 1
        if found:
            words = f"{one.family}, {asked.label}, {out.request}, {out.cached} cached: {found}"
            ledger.violation("wrong tokens", words)


def _differ(group: Sequence[Sample]) -> bool:
    """Whether one reply to the same messages is not the beginning of another."""
    longest = max((one.out.text for one in group), key=len)
    return not all(longest.startswith(one.out.text) for one in group)
