"""Plan of a run, drawn from its seed alone: rounds, faults, ends, and steps of agents."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")

FAMILIES = ("llama", "gemma3", "qwen3_5")
"""Plain attention, sliding windows, recurrent layers."""

Place = Literal["shared", "private", "wide"]
End = Literal["kill", "term", "die"]
Target = Literal["steady", "brief"]

PLACES: tuple[Place, ...] = ("shared", "shared", "private", "shared", "shared", "wide")
"""Kinds of rounds, in turn. `shared`: a steady server, which runs for the whole run, and a brief
one, which runs for the round, share one folder that must lose nothing. `private`: the folder's
files are damaged and removed, under a small disk limit. `wide`: a model with much KV per token, to
fill a budget that is large compared with the process itself."""

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
"""Faults that last, each with the range of its duration in seconds."""

STOP_S = 60.0
"""Duration of the occasional long stop of a server, in seconds."""

COUNTED = ("malloc", "nan")
"""Faults of a number of forward passes."""

FILES = ("damage", "remove", "index")
"""Faults of the files of a private folder, before the server starts or while it runs."""

STEPS = {
    "turn": 30, "again": 8, "edit_last": 7, "edit_middle": 5, "leave": 14, "slow": 4, "twice": 6,
    "side": 4, "fork": 4, "pin": 3, "remove": 3, "snapshot": 3, "warm": 3, "wrong": 2, "look": 2,
    "fresh": 5,
}  # fmt: skip
"""Kinds of steps of an agent, with their relative frequencies."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `at`, `lasts`: start and duration in seconds. `measure`: see `tests.faulty`."""

    name: str
    at: float
    lasts: float
    on: Target
    measure: str = ""


@dataclass(frozen=True, slots=True)
class Round:
    """Plan of one round: flags of the brief server, faults, and its end.

    `files`: faults of the folder, before the server starts and while it runs. `starting`: kill
    another server so many seconds after its start, None for no kill. `clear`: clear the cache at
    the end of the round.
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
    """One step of an agent: its kind, and random numbers from 0 to 1 that choose the details."""

    kind: str
    server: float
    conversation: float
    size: float
    moment: float
    odd: float
    shape: float


def draw_rounds(seed: int, families: tuple[str, ...], seconds: float) -> Iterator[Round]:
    rng = random.Random(f"{seed} rounds")
    faults = _deck(rng, [*LASTING, *COUNTED])
    files = _deck(rng, FILES)
    ends = _deck(rng, ENDS)
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
            faults=(Fault("stop", 2.0, STOP_S, "brief"),) if long else drawn,
            files=(next(files), next(files)) if small else (),
            end=next(ends),
            end_at=length - rng.uniform(0.0, 0.5) * seconds,
            starting=rng.uniform(0.0, 3.0) if rng.random() < 0.1 else None,
            clear=place == "shared" and number % 12 == 9,
        )
        number += 1


def _deck(rng: random.Random, items: Sequence[T]) -> Iterator[T]:
    """Yield `items` in random order, again and again; each pass has every item once."""
    while True:
        yield from rng.sample(items, len(items))


def _fault(rng: random.Random, name: str, place: Place, seconds: float) -> Fault:
    on: Target = "brief" if place != "shared" or rng.random() < 0.5 else "steady"
    at = rng.uniform(0.1, 0.6) * seconds
    if name in COUNTED:
        return Fault(name, at, 0.0, on, str(rng.choice((1, 1, 2, 4))))
    lasts = rng.uniform(*LASTING[name])
    measure = {"slow": "0.7", "clock": str(rng.choice((-1, 1)) * 365 * 86400)}.get(name, "")
    return Fault(name, at, lasts, on, measure)


def draw_steps(seed: int, agent: str) -> Iterator[Step]:
    rng = random.Random(f"{seed} {agent}")
    kinds, weights = list(STEPS), list(STEPS.values())
    while True:
        kind = rng.choices(kinds, weights)[0]
        yield Step(kind, *(rng.random() for _ in range(6)))
