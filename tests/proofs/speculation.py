"""Simulated speed of replies with guesses, for an oracle that writes what agents write.

`python -m tests.proofs.speculation` plays sessions of several shapes at three cost curves, prints
tokens per pass and speed in units of the speed without guesses, and fails below the thresholds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mlxcache.guess.forms import reply_form
from mlxcache.guess.history import History
from mlxcache.guess.rule import PassCost, Repeats, ReplyRule, Survival, Tries
from mlxcache.types import token_ids
from tests.proofs.agent_sessions import Kind, Message, Style, Words, session

CURVES: Mapping[str, PassCost] = {
    "0.24 to 12": lambda q: 1.0 + 0.24 * (min(q, 12) - 1),
    "0.75 to 6.3": lambda q: 1.0 if q == 1 else min(1.0 + 0.75 * (q - 1), 6.3),
    "MoE 0.30": lambda q: 1.0 + 0.30 * (q - 1),
}
"""Cost of a pass over q tokens, in passes over one, of three kinds of chips and models."""

SHAPES: Sequence[tuple[Kind, Style]] = (
    ("edit", "json"),
    ("edit", "xml"),
    ("write", "json"),
    ("write", "xml"),
    ("diff", "xml"),
    ("bash", "json"),
    ("mixed", "json"),
    ("prose", "json"),
)

LEAST: Mapping[Kind, float] = {"edit": 1.8, "write": 3.5, "mixed": 1.2, "prose": 0.995}
"""Least speed at the first curve."""

WORST, WORST_TOKENS = 0.97, 100
"""Least speed of any reply of so many tokens or more, at every curve."""

SESSIONS = 3


@dataclass
class Speed:
    """What was measured of some replies. `replies`: tokens and cost of each."""

    replies: list[tuple[int, float]] = field(default_factory=list)
    passes: int = 0

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.replies)

    @property
    def speed(self) -> float:
        return self.tokens / sum(cost for _, cost in self.replies)

    @property
    def worst(self) -> float:
        """Speed of the slowest reply of `WORST_TOKENS` tokens or more, 1 if there is none."""
        return min((n / c for n, c in self.replies if n >= WORST_TOKENS), default=1.0)


def play(
    messages: Sequence[Message],
    words: Words,
    cost: PassCost,
    survival: Survival,
    measured: Speed,
    *,
    escaped: bool,
    forms: bool = True,
    redo: bool = False,
) -> None:
    """Let an oracle write the replies of a session, and add what they take to `measured`."""
    history, said = History(), list[int]()
    for number, message in enumerate(messages):
        ids = words.encode(("assistant" if message.reply else "user") + "\n" + message.text + "\n")
        if not message.reply:
            said += ids
            form = reply_form(message.text, escaped=escaped) if message.result and forms else None
            if form is not None:
                made = token_ids(words.encode(form))
                history.add_forms({str(number): made})
            continue
        said += ids[:2]
        history.follow(token_ids(said))
        guesses = Repeats(history, survival)
        measured.replies.append((len(ids) - 2, write(guesses, ids[2:], cost, measured, redo=redo)))
        said += ids[2:]


def write(
    guesses: Repeats, ids: Sequence[int], cost: PassCost, measured: Speed, *, redo: bool
) -> float:
    """Write `ids` with guesses as the decoder does; return what it costs."""
    rule = ReplyRule(Tries(), redo=redo)
    total, at, again = 0.0, 0, 0
    drawn = False  # the token at `at`, which is fed next, is known and not only being computed
    while at < len(ids):
        offer = guesses.offer(cost, len(ids) - at - 1, ahead=not drawn)
        guess = guesses.tokens[: rule.choose([offer], again)[1]]
        right = 0
        while right < len(guess) and guess[right] == ids[at + 1 + right]:
            right += 1
        spent = cost(1 + again + len(guess))
        total += spent
        measured.passes += 1
        rule.note_pass(spent, right, plain=not guess)
        new = at + 1 + right if guess else at  # the newest token that is known afterwards
        guesses.say(ids[at + drawn : new + 1])
        again = again + right + 1 if redo and right < len(guess) else 0
        at, drawn = at + 1 + right, bool(guess)
    return total


def simulate(
    shape: tuple[Kind, Style], cost: PassCost, *, sessions: int = SESSIONS, **options: bool
) -> Speed:
    """Play sessions of one shape, each of another seed, with counts that go on."""
    kind, style = shape
    words, survival, measured = Words(), Survival(), Speed()
    for seed in range(sessions):
        messages = session(kind, style, seed)
        play(messages, words, cost, survival, measured, escaped=style == "json", **options)
    return measured


def faults(found: Mapping[tuple[str, str], Speed]) -> Iterator[str]:
    """What is below a threshold, of speeds by shape and curve."""
    first = next(iter(CURVES))
    for (shape, curve), speed in found.items():
        kind = shape.split()[0]
        least = LEAST.get(kind, 0.0) if curve == first else 0.0  # type: ignore[call-overload]
        if speed.speed < least:
            yield f"{shape} at {curve}: {speed.speed:.3f}, at least {least}"
        if speed.worst < WORST:
            yield f"{shape} at {curve}: worst reply {speed.worst:.3f}, at least {WORST}"


def main(out: Callable[[str], object] = print) -> int:
    found: dict[tuple[str, str], Speed] = {}
    out(f"{'shape':12} {'curve':12} {'tokens':>7} {'a pass':>7} {'speed':>6} {'worst':>6}")
    for kind, style in SHAPES:
        for curve, cost in CURVES.items():
            began = time.perf_counter()
            speed = found[f"{kind} {style}", curve] = simulate((kind, style), cost)
            rate = speed.tokens / speed.passes
            out(
                f"{kind + ' ' + style:12} {curve:12} {speed.tokens:7} {rate:7.2f} "
                f"{speed.speed:6.3f} {speed.worst:6.3f}   {time.perf_counter() - began:.1f} s"
            )
    wrong = list(faults(found))
    for fault in wrong:
        out(f"FAULT {fault}")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
