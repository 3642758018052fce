"""Counts, violations and known sessions of a run, of all servers and agents. Thread-safe."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.soak.wire import Outcome, Request


@dataclass(frozen=True, slots=True)
class Sample:
    family: str
    request: Request
    out: Outcome


@dataclass(slots=True)
class Overshoot:
    """Peak memory of a server beyond weights, budget and its idle process."""

    nbytes: int
    share: float
    of: str


class Ledger:
    """Counters and violations of a run; a violation is printed at once.

    `print_line` prints one line.
    """

    def __init__(self, print_line: Callable[[str], None]):
        self.print_line = print_line
        self.requests: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.violations: list[str] = []
        self.overshoots: list[Overshoot] = []
        self.checks: Counter[str] = Counter()
        """Replies "checked", and the upper bound of tokens "computed" since the last clearing."""
        self._samples: list[Sample] = []
        self._lock = threading.Lock()

    def add_violation(self, kind: str, sentence: str) -> None:
        with self._lock:
            self.kinds[kind] += 1
            self.violations.append(f"{kind}: {sentence}")
        self.print_line(f"  VIOLATION {kind}: {sentence}")

    def count(self, counter: Counter[str], name: str, by: int = 1) -> None:
        with self._lock:
            counter[name] += by

    def add_reply(self, family: str, request: Request, out: Outcome) -> None:
        with self._lock:
            self.tokens["prompt"] += out.prompt
            self.tokens["cached"] += out.cached
            self.tokens["generated"] += len(out.text)
            self._samples.append(Sample(family, request, out))
            self.checks["computed"] += out.prompt - out.cached + len(out.text)

    def take_samples(self) -> list[Sample]:
        with self._lock:
            found, self._samples = self._samples, []
        return found


@dataclass(slots=True)
class KnownSession:
    """Names of a session, and its largest durable tokens by number of turns."""

    labels: str
    durable: dict[int, int] = field(default_factory=dict)


class SessionTracker:
    """Sessions of one folder that must still exist, with their durable tokens.

    A turn may replace a longer conversation by a shorter one, so durable tokens are kept per number
    of turns. A listing is not atomic, so a figure counts once the next listing confirms it.
    """

    def __init__(self) -> None:
        self._seen: dict[str, KnownSession] = {}
        self._last: dict[str, tuple[int, int]] = {}
        self._gone: set[str] = set()
        self.cleared = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def durable_tokens(self) -> int:
        with self._lock:
            return sum(max(seen.durable.values(), default=0) for seen in self._seen.values())

    def observe(self, listed: Sequence[Mapping[str, Any]], cleared: int = 0) -> None:
        """Record a listing, requested when the sessions had been cleared `cleared` times."""
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
                    seen = self._seen.setdefault(id, KnownSession(labels))
                    seen.durable[turns] = max(seen.durable.get(turns, 0), min(before[1], durable))

    def drop_unconfirmed(self) -> None:
        with self._lock:
            self._last.clear()

    def remove(self, id: str) -> None:
        with self._lock:
            self._gone.add(id)
            self._seen.pop(id, None)

    def forget_durable(self, words: str) -> None:
        with self._lock:
            for id, seen in list(self._seen.items()):
                if words in seen.labels:
                    self._seen[id].durable.clear()

    def clear(self) -> None:
        """Forget all sessions, cleared on purpose; listings requested before are ignored."""
        with self._lock:
            self.cleared += 1
            self._seen.clear()
            self._last.clear()

    def expected(self) -> dict[str, KnownSession]:
        with self._lock:
            return {id: KnownSession(x.labels, dict(x.durable)) for id, x in self._seen.items()}

    def missing(
        self, known: Mapping[str, KnownSession], listed: Sequence[Mapping[str, Any]]
    ) -> tuple[list[str], list[str]]:
        """Return sentences on missing sessions, and on sessions with fewer durable tokens.

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
