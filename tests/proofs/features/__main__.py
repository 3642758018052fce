"""`python -m tests.proofs.features`: see `--help`."""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from tests.proofs.features.arena import MODELS, opened, simplest
from tests.proofs.features.plan import Conversation, draw_conversation
from tests.proofs.features.play import Counts, Difference, Pair, play

Conversations = Annotated[int, typer.Option(min=1, help="Number of conversations, of all models.")]
Seed = Annotated[int, typer.Option(help="Number of the first conversation.")]
ModelName = Annotated[
    list[str] | None, typer.Option("--model", help=f"One of {', '.join(MODELS)}. Repeatable.")
]
Processes = Annotated[bool, typer.Option(help="Start servers as processes, and kill some of them.")]
Minutes = Annotated[float, typer.Option(min=0.1, help="Begin no conversation after this time.")]


PROGRESS = 20
"""Conversations after each of which a line is printed."""


class Run:
    """Conversations with each of some models in turn. `failed`: those that were not right."""

    def __init__(self, folder: Path, seeds: range, models: list[str], *, processes: bool):
        self._folder, self._seeds, self._models = folder, seeds, models
        self._processes = processes
        self._opened = 0
        self.counts: dict[str, Counts] = {}
        self.failed = 0

    def run(self, minutes: float) -> None:
        """Play all; each model has an equal part of the time."""
        began = time.monotonic()
        for number, name in enumerate(self._models):
            end = began + 60 * minutes * (number + 1) / len(self._models)
            seeds = [seed for seed in self._seeds if self._model_of(seed) == name]
            while seeds and time.monotonic() < end:
                seeds = self._play(name, seeds, end)

    def _model_of(self, seed: int) -> str:
        return self._models[seed % len(self._models)]

    def _new_folder(self) -> Path:
        self._opened += 1
        return self._folder / str(self._opened)

    def _play(self, name: str, seeds: list[int], end: float) -> list[int]:
        """Play until one fails, and return the rest: what it left behind is not played on."""
        with opened(name, self._new_folder(), outside=self._processes) as pair:
            for at, seed in enumerate(seeds):
                if time.monotonic() > end:
                    break
                if at % PROGRESS == PROGRESS - 1:
                    counts = pair.counts
                    print(f"{name}: {counts.conversations}; {_line(counts.events)}", flush=True)
                if why := _why(draw_conversation(seed), pair):
                    self.failed += 1
                    self._report(name, seed, why)
                    self._add(pair)
                    return seeds[at + 1 :]
            self._add(pair)
        return []

    def _add(self, pair: Pair) -> None:
        total = self.counts.setdefault(pair.name, Counts())
        total.tokens += pair.counts.tokens
        total.conversations += pair.counts.conversations
        total.features += pair.counts.features
        total.events += pair.counts.events

    def _report(self, name: str, seed: int, why: str) -> None:
        print(
            f"FAILED: {name}, seed {seed}: {why}\nagain: python -m tests.proofs.features "
            f"--model {name} --seed {seed} --conversations 1",
            flush=True,
        )

        def fails(conversation: Conversation) -> bool:
            with opened(name, self._new_folder(), outside=self._processes) as pair:
                return bool(_why(conversation, pair))

        conversation = draw_conversation(seed)
        if not fails(conversation):
            print("alone it does not fail: it needs conversations before it", flush=True)
            return
        print(f"simplest: {simplest(conversation, fails)}", flush=True)


def _why(conversation: Conversation, pair: Pair) -> str:
    """Return why a conversation fails, nothing if it does not."""
    try:
        play(conversation, pair)
    except Difference as error:
        return str(error)[:4000]
    return ""


def features(
    *,
    conversations: Conversations = 200,
    seed: Seed = 0,
    model: ModelName = None,
    processes: Processes = False,
    minutes: Minutes = 600.0,
) -> None:
    """Play random conversations with random features to servers that cache and that do not.

    Exit status 1 if a reply, a count or a server is not as it should be.
    """
    logging.getLogger("mlxcache").setLevel(logging.ERROR)
    names = model or list(MODELS)
    with tempfile.TemporaryDirectory(prefix="mlxcache-features-") as folder:
        seeds = range(seed, seed + conversations)
        run = Run(Path(folder), seeds, names, processes=processes)
        run.run(minutes)
    total: Counter[str] = Counter()
    for name, counts in run.counts.items():
        total += counts.features
        print(f"{name}: {counts.conversations} conversations; {_line(counts.events)}")
    print(f"features: {_line(total)}")
    print(f"{sum(one.conversations for one in run.counts.values())} right, {run.failed} failed")
    if run.failed:
        sys.exit(1)


def _line(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


if __name__ == "__main__":
    typer.run(features)
