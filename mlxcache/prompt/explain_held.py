"""The last prompts of each session, that the next one can be compared with. Bounded in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from mlxcache.common_prefix import common_length
from mlxcache.lru import LatestByGroup
from mlxcache.prompt.explain import Side
from mlxcache.prompt.explain_chats import related
from mlxcache.types import Tokens


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A served prompt: `computed` tokens of it and its reply were in a cache when it ended."""

    session: str | None
    side: Side
    computed: int
    owner: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps alive."""
        return self.side.source.nbytes + self.side.ids.nbytes


class Candidates:
    """The last `each` prompts of every session, `count` and `limit` bytes of all at most.

    For one thread. What was kept first goes first.
    """

    def __init__(self, *, count: int = 64, each: int = 4, limit: int = 64 << 20):
        self._held: LatestByGroup[tuple[str | None, str | None], Candidate] = LatestByGroup(
            each=each, count=count, limit=limit, size=lambda one: one.nbytes
        )

    def add(self, new: Candidate) -> None:
        """Keep a prompt, in the place of one of its session that it goes on with."""
        ids, group = new.side.ids, (new.session, new.owner)
        continued = [
            one
            for one in self._held.of(group)
            if common_length(one.side.ids, ids) >= 0.75 * len(one.side.ids)
        ]
        self._held.add(group, new, replaced=continued)

    def all(self) -> list[Candidate]:
        """A copy of the list of them, for another thread."""
        return [one for _, one in self._held.items()]

    @staticmethod
    def by_worth(
        held: list[Candidate], session: str | None, ids: Tokens
    ) -> list[tuple[Candidate, int]]:
        """Candidates with the tokens that they share: the session's own first, then by these, then
        the newest."""
        found = [(one, common_length(one.side.ids, ids)) for one in reversed(held)]
        return sorted(found, key=lambda pair: (pair[0].session != session, -pair[1]))

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes that all of them keep alive."""
        return self._held.total


def best(found: list[tuple[Candidate, int]], side: Side) -> Candidate | None:
    """The first candidate that a prompt's conversation goes on with, or shares the head of."""
    for candidate, _ in found:
        if related(candidate.side.source.chat, side.source.chat):
            return candidate
    return None
