"""Speed of replies with guesses by the wall clock, on a model that is made to write given text.

`python -m tests.proofs.speculation_wall [KIND ...]` measures the costs of passes as a server does,
then writes the replies of agents' sessions with and without guesses in turn on this machine. KIND
is write, edit or prose; default: all.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import mlx.core as mx

from mlxcache.guess.forms import reply_form
from mlxcache.guess.rule import PassCosts
from mlxcache.model.kv import Layout
from mlxcache.scheduling.short_passes import measure_passes
from mlxcache.scheduling.speculation import Conversations
from mlxcache.scheduling.task import Output, Task
from mlxcache.types import Tokens, token_ids
from tests.proofs import models
from tests.proofs.agent_sessions import Kind, Style, Words, session
from tests.scheduled import Bench
from tests.scheduling.guesses import speculating

SHAPES: Sequence[tuple[Kind, Style]] = (("write", "xml"), ("edit", "xml"), ("prose", "json"))
VOCABULARY = models.VOCABULARY
LEAST = 0.97
"""Least speed of any shape."""

TURNS, PAIRS, LONGEST = 3, 2, 300
"""Replies of each shape, times that each is written with and without guesses, and their tokens."""


class Dictated:
    """A sampler that draws given tokens, whatever the model computes."""

    def __init__(self, ids: Sequence[int]):
        self._ids, self._at = ids, 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        self._at += 1
        return mx.array([self._ids[min(self._at, len(self._ids)) - 1]], mx.uint32) + mx.argmax(
            mx.zeros_like(logprobs), axis=-1
        )  # waits for the pass, as a draw does


class Oracle(Bench):
    """A bench whose replies are `dictation`."""

    dictation: Sequence[int] = ()

    def prepare_output(self, task: Task) -> Output:
        output = super().prepare_output(task)
        output.row.set_draws(Dictated(self.dictation), None)
        return output


@dataclass(frozen=True)
class Turn:
    """A prompt and its reply, and the tool results before it as a reply would repeat them."""

    prompt: list[int]
    reply: list[int]
    forms: Mapping[str, Tokens]


def turns(kind: Kind, style: Style, words: Words) -> list[Turn]:
    """Turns of a session whose replies are long enough to be timed."""

    def encode(text: str) -> list[int]:
        return [i % VOCABULARY for i in words.encode(text)]

    said, found, forms = list[int](), list[Turn](), dict[str, Tokens]()
    for message in session(kind, style, 3):
        ids = encode(message.text + "\n")
        if message.reply and len(ids) >= 100:
            found.append(Turn([*said, 1, 2], ids[:LONGEST], dict(forms)))
        form = reply_form(message.text, escaped=style == "json") if message.result else None
        if form is not None:
            forms[message.text] = token_ids(encode(form))
        said += ids
    return found[:TURNS]


def timed(bench: Bench, prompt: Sequence[int], tokens: int) -> tuple[float, Task]:
    """Write a reply; return the seconds of its decoding."""
    task = bench.put(prompt, tokens=tokens)
    bench.run(until=lambda: bool(task.out))
    began = time.perf_counter()
    while not bench.scheduler.idle:
        bench.tick()
    return time.perf_counter() - began, task


def dictated(bench: Bench, prompt: list[int], reply: list[int]) -> tuple[float, Task]:
    assert isinstance(bench, Oracle)
    bench.dictation = reply
    seconds, task = timed(bench, prompt, len(reply))
    assert task.out == reply
    return seconds, task


@dataclass
class Compared:
    """Replies of one shape: seconds without and with guesses, and the sums of their counts."""

    seconds: list[tuple[float, float]] = field(default_factory=list)
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    passes: int = 0

    @property
    def speed(self) -> float:
        """Speed with guesses of all replies together, in units of that without."""
        return sum(slow for slow, _ in self.seconds) / sum(fast for _, fast in self.seconds)

    @property
    def middle(self) -> float:
        return median(slow / fast for slow, fast in self.seconds)


def compare(plain: Bench, costs: PassCosts, shape: tuple[Kind, Style]) -> Compared:
    found = Compared()
    for pair in range(PAIRS):
        forms = dict[str, Tokens]()
        fast = speculating(plain, Conversations(forms=lambda task, made=forms: made), costs=costs)  # type: ignore[misc]
        slow = plain.twin()
        for number, turn in enumerate(turns(*shape, Words())):
            forms.update(turn.forms)
            order = (slow, fast) if (pair + number) % 2 else (fast, slow)
            took = {id(bench): dictated(bench, turn.prompt, turn.reply) for bench in order}
            record = took[id(fast)][1].record
            found.seconds.append((took[id(slow)][0], took[id(fast)][0]))
            found.tokens += len(turn.reply)
            found.drafted += record.drafted_tokens
            found.accepted += record.accepted_tokens
            found.passes += record.guess_passes
    return found


def measured(model: object, layout: Layout) -> PassCosts:
    return PassCosts(measure_passes(model, layout, 1 << 26).curves)


def main(
    out: Callable[[str], object] = print,
    kinds: Sequence[str] = (),
    *,
    hidden: int = 384,
    layers: int = 4,
) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = models.grouped(Path(folder) / "model", hidden, layers)
        bench = Oracle(path, chunk=512)
        costs = measured(bench.model, bench.kv.layout)
        curve = ", ".join(f"c({q}) {costs.at(1000)(q):.2f}" for q in (2, 4, 8, 12, 16, 32))
        out(f"{1e3 * costs.seconds(1000):.1f} ms a pass, {curve}")
        slower = 0
        for shape in (one for one in SHAPES if not kinds or one[0] in kinds):
            found = compare(bench, costs, shape)
            out(
                f"{' '.join(shape):12} {found.speed:.2f}, median {found.middle:.2f}; "
                f"{found.tokens} tokens, {found.accepted} of {found.drafted} guessed right "
                f"in {found.passes} passes"
            )
            slower += found.middle < LEAST
        return slower


if __name__ == "__main__":
    sys.exit(1 if main(print, sys.argv[1:]) else 0)
