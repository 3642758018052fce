"""What was seen and counted so far, of all servers and agents. Safe in any thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.soak.wire import Asked, Outcome


@dataclass(frozen=True, slots=True)
class Sample:
    """A reply that the reference may look at."""

    family: str
    asked: Asked
    out: Outcome


@dataclass(slots=True)
class Overshoot:
    """The most that a server took beyond weights, budget and what it took at its start."""

    nbytes: int
    share: float
    of: str


class Ledger:
    """`say` prints a line. Violations are told at once, by kind."""

    def __init__(self, say: Callable[[str], None]):
        self.say = say
        self.requests: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.violations: list[str] = []
        self.overshoots: list[Overshoot] = []
        self.checked = 0
        self.computed = 0
        """The most tokens that agents had computed since the shared folder was cleared."""
        self._samples: list[Sample] = []
        self._lock = threading.Lock()

    def violation(self, kind: str, sentence: str) -> None:
        """Something that must not be."""
        with self._lock:
            self.kinds[kind] += 1
            self.violations.append(f"{kind}: {sentence}")
        self.say(f"  VIOLATION {kind}: {sentence}")

    def count(self, counter: Counter[str], name: str, by: int = 1) -> None:
        """Count something."""
        with self._lock:
            counter[name] += by

    def answered(self, family: str, asked: Asked, out: Outcome) -> None:
        """A whole reply came."""
        with self._lock:
            self.tokens["prompt"] += out.prompt
            self.tokens["cached"] += out.cached
            self.tokens["generated"] += len(out.text)
            self._samples.append(Sample(family, asked, out))
        self.fed(out.prompt - out.cached + len(out.text))

    def fed(self, tokens: int) -> None:
        """So many tokens may have been computed."""
        with self._lock:
            self.computed += tokens

    def samples(self) -> list[Sample]:
        """The replies since this was asked last."""
        with self._lock:
            found, self._samples = self._samples, []
        return found


@dataclass(slots=True)
class Seen:
    """A session: its names, and by turns the most tokens that were durable."""

    labels: str
    durable: dict[int, int] = field(default_factory=dict)


class Sessions:
    """The sessions of one folder: by how many turns each had, the most tokens that were durable.

    A turn may put a shorter conversation in the place of a longer one, so what was durable counts
    for its own number of turns. A listing is not one look at the table, so what it says counts once
    the next one says it too.
    """

    def __init__(self) -> None:
        self._seen: dict[str, Seen] = {}
        self._last: dict[str, tuple[int, int]] = {}
        self._gone: set[str] = set()
        self.cleared = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def durable_tokens(self) -> int:
        """All that must be there, in tokens."""
        with self._lock:
            return sum(max(seen.durable.values(), default=0) for seen in self._seen.values())

    def take(self, listed: Sequence[Mapping[str, Any]], cleared: int = 0) -> None:
        """Note what a server listed, asked when all had been cleared so many times."""
        with self._lock:
            if cleared != self.cleared:
                return
            for one in listed:
                id, turns, durable = one["id"], one["turns"], one["durable_tokens"]
                if id in self._gone:
                    continue
                before = self._last.get(id)
                self._last[id] = (turns, durable)
                if before is not None and before[0] == turns:
                    labels = f"{one['label']} {one['name']} {one['title']}"
                    seen = self._seen.setdefault(id, Seen(labels))
                    seen.durable[turns] = max(seen.durable.get(turns, 0), min(before[1], durable))

    def again(self) -> None:
        """What was said last, by servers that are gone, is not confirmed any more."""
        with self._lock:
            self._last.clear()

    def remove(self, id: str) -> None:
        """A session is being removed, on purpose."""
        with self._lock:
            self._gone.add(id)
            self._seen.pop(id, None)

    def forget(self, words: str) -> None:
        """What was durable of sessions with `words` in their names need not be there any more."""
        with self._lock:
            for id, seen in list(self._seen.items()):
                if words in seen.labels:
                    self._seen[id].durable.clear()

    def clear(self) -> None:
        """All are gone, on purpose; what was asked for before that counts no more."""
        with self._lock:
            self.cleared += 1
            self._seen.clear()
            self._last.clear()

    def known(self) -> dict[str, Seen]:
        """What must be there now, whatever is seen later."""
        with self._lock:
            return {id: Seen(x.labels, dict(x.durable)) for id, x in self._seen.items()}

    def missing(
        self, known: Mapping[str, Seen], listed: Sequence[Mapping[str, Any]]
    ) -> tuple[list[str], list[str]]:
        """Sessions that are gone, and tokens that are not durable any more, as sentences.

        `listed` was asked for after `known`; what was removed since need not be there.
        """
        now = {one["id"]: one for one in listed}
        gone, short = [], []
        for id, seen in known.items():
            if id in self._gone:
                continue
            if id not in now:
                gone.append(f"session {id} ({seen.labels}) is gone")
                continue
            turns, durable = now[id]["turns"], now[id]["durable_tokens"]
            before = seen.durable.get(turns, 0)
            if durable < before:
                short.append(
                    f"session {id} ({seen.labels}) had {before} durable tokens after {turns} "
                    f"turns and has {durable}"
                )
        return gone, short
