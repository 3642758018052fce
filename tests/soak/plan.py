"""What happens in a run, drawn from its seed alone: rounds, faults, ends, and agents' steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

FAMILIES = ("llama", "gemma3", "qwen3_5")
"""Plain attention, sliding windows, recurrent layers."""

Place = Literal["shared", "private", "wide"]
End = Literal["kill", "term", "die"]
Target = Literal["steady", "mortal"]

PLACES: tuple[Place, ...] = ("shared", "shared", "private", "shared", "shared", "wide")
"""By turns. `shared`: a steady server and a mortal one on one folder, of which nothing may be lost.
`private`: a folder whose files are damaged and removed, under a small cap. `wide`: much KV per
token, so that a budget is filled that is large beside what a process takes for itself."""

ENDS: tuple[End, ...] = ("kill", "term", "kill", "die", "kill")

LASTING: dict[str, tuple[float, float]] = {
    "hang": (0.5, 3.0),
    "template": (0.2, 0.8),
    "tokenizer": (0.2, 0.8),
    "full": (2.0, 6.0),
    "locked": (2.0, 6.0),
    "slow": (3.0, 8.0),
    "clock": (3.0, 8.0),
    "stop": (1.0, 8.0),
}
"""Faults that begin and end, and the seconds that they last."""

STOP_S = 60.0
"""For how long a server is stopped now and then."""

COUNTED = ("malloc", "nan")
"""Faults of the next forward passes."""

FILES = ("damage", "remove", "index")
"""What is done to the files of a private folder: before the server starts, or beside it."""

STEPS = {
    "turn": 30, "again": 8, "edit_last": 7, "edit_middle": 5, "leave": 14, "slow": 4, "twice": 6,
    "side": 4, "fork": 4, "pin": 3, "remove": 3, "snapshot": 3, "warm": 3, "wrong": 2, "look": 2,
    "fresh": 5,
}  # fmt: skip
"""What an agent does, and how often beside all else."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `at` and `lasts` in seconds, `measure` as `tests.faulty` reads it."""

    name: str
    at: float
    lasts: float
    on: Target
    measure: str = ""


@dataclass(frozen=True, slots=True)
class Round:
    """One round: what the mortal server is started with, what happens to it, and how it ends.

    `files`: what is done to its folder before it starts, and while it runs. `starting`: seconds
    after which a server is killed while it starts, None where that is not done. `clear`: all that
    is cached goes at its end.
    """

    number: int
    family: str
    place: Place
    seconds: float
    ram: str
    disk: str
    concurrency: int
    chunk: int
    faults: tuple[Fault, ...]
    files: tuple[str, ...]
    end: End
    end_at: float
    starting: float | None
    clear: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that an agent does. The numbers, each from 0 to 1, are mapped to what there is."""

    kind: str
    server: float
    talk: float
    size: float
    moment: float
    odd: float
    shape: float


def rounds(seed: int, families: tuple[str, ...], seconds: float) -> Iterator[Round]:
    """Rounds without end."""
    rng = random.Random(f"{seed} rounds")
    faults = _deck(rng, [*LASTING, *COUNTED])
    files = _deck(rng, list(FILES))
    ends = _deck(rng, list(ENDS))
    number = 0
    while True:
        place = PLACES[number % len(PLACES)]
        family = families[(number // 2 + number // len(PLACES)) % len(families)]
        count = {"shared": 3, "private": 2, "wide": 1}[place]
        small = place == "private"
        drawn = tuple(_fault(rng, next(faults), place, seconds) for _ in range(count))
        long = number % 40 == 20
        length = seconds + (STOP_S if long else seconds if place == "wide" else 0.0)
        yield Round(
            number=number,
            family=family,
            place=place,
            seconds=length,
            ram="200MB" if place == "wide" else rng.choice(("24MB", "32MB", "48MB")),
            disk=rng.choice(("4MB", "8MB")) if small else "2GB" if place == "wide" else "8GB",
            concurrency=rng.choice((2, 4, 8)),
            chunk=rng.choice((64, 256, 2048)),
            faults=(Fault("stop", 2.0, STOP_S, "mortal"),) if long else drawn,
            files=(next(files), next(files)) if small else (),
            end=next(ends),
            end_at=length - rng.uniform(0.0, 0.5) * seconds,
            starting=rng.uniform(0.0, 3.0) if rng.random() < 0.1 else None,
            clear=place == "shared" and number % 12 == 9,
        )
        number += 1


def _deck(rng: random.Random, names: list[str]) -> Iterator[str]:
    """Each of `names` once, in any order, and again."""
    while True:
        yield from rng.sample(names, len(names))


def _fault(rng: random.Random, name: str, place: Place, seconds: float) -> Fault:
    on: Target = "mortal" if place != "shared" or rng.random() < 0.5 else "steady"
    at = rng.uniform(0.1, 0.6) * seconds
    if name in COUNTED:
        return Fault(name, at, 0.0, on, str(rng.choice((1, 1, 2, 4))))
    lasts = rng.uniform(*LASTING[name])
    measure = {"slow": "0.7", "clock": str(rng.choice((-1, 1)) * 365 * 86400)}.get(name, "")
    return Fault(name, at, lasts, on, measure)


def steps(seed: int, agent: str) -> Iterator[Step]:
    """What an agent does, without end."""
    rng = random.Random(f"{seed} {agent}")
    kinds, weights = list(STEPS), list(STEPS.values())
    while True:
        kind = rng.choices(kinds, weights)[0]
        yield Step(kind, *(rng.random() for _ in range(6)))
