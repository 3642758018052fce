"""Traces: token counts and shared prefixes of requests, without any text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from mlxcache.types import Tokens, token_ids

Ints = npt.NDArray[np.int32]
Part = tuple[int, int]
"""Id and number of tokens."""

Form = Literal["mlxcache", "agentic", "mooncake", "sessions", "agents"]


@dataclass(frozen=True, slots=True, eq=False)
class TokenPath:
    """Parts of a prompt and its reply, in their order.

    `ids` has the id of each part, from 1 on, and `lengths` its number of tokens, both int32 of
    shape (n,). Equal ids stand for equal tokens after equal prefixes, so two paths share a prefix
    as far as their ids agree.
    """

    ids: Ints
    lengths: Ints


def path_of(parts: Iterable[Part]) -> tuple[TokenPath, int]:
    """Return the path of `parts`, without empty ones, and their number."""
    kept = [part for part in parts if part[1]]
    both = np.array(kept, np.int32).reshape(len(kept), 2)
    return TokenPath(both[:, 0].copy(), both[:, 1].copy()), len(kept)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    The first `prompt_parts` parts of `path` are its prompt, those up to `parts` its reply; what
    follows belongs to later requests that continue it.

    It arrives `delay` seconds after all the requests `after`, positions in the trace before its
    own, have ended; without any, at its `time`, in seconds since the trace began. `key`: leading
    tokens that identify the conversation, None if unknown; `head`: those of tools and system
    prompt. `cached`: tokens that the recorded server reused, None if unknown; `restored`: those of
    them from disk. `took`: seconds that the request took on that server, 0 if unknown.
    """

    time: float
    session: str | None
    path: TokenPath
    parts: int
    prompt_parts: int
    after: tuple[int, ...] = ()
    delay: float = 0.0
    key: int | None = None
    head: int = 0
    cached: int | None = None
    restored: int = 0
    took: float = 0.0

    @property
    def ids(self) -> Ints:
        return self.path.ids[: self.parts]

    @property
    def lengths(self) -> Ints:
        return self.path.lengths[: self.parts]

    @property
    def prompt_tokens(self) -> int:
        return int(self.lengths[: self.prompt_parts].sum())

    @property
    def reply_tokens(self) -> int:
        return int(self.lengths[self.prompt_parts :].sum())

    def shared(self, other: Request) -> int:
        """Return how many tokens the paths of two requests have in common."""
        ids, others = self.ids, other.ids
        differ = np.flatnonzero(ids[: len(others)] != others[: len(ids)])
        same = int(differ[0]) if len(differ) else min(len(ids), len(others))
        return int(self.lengths[:same].sum())

    def tokens(self) -> Tokens:
        """Return substitutes for the path's token ids, shape (n,).

        Each part becomes its id and then zeros, so two results share a prefix as the paths do.
        """
        starts = np.cumsum(self.lengths) - self.lengths
        found = np.zeros(int(self.lengths.sum()), np.int32)
        found[starts] = self.ids
        return token_ids(found)


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests, and where they come from.

    `requests`: in the order of their times if `form` is "mlxcache"; else in that of the file.
    `growth`: as measured on the recorded server, for its eviction; 0 if unknown. See
    `plan.simulate.Speed`.
    """

    requests: tuple[Request, ...]
    form: Form
    block_tokens: int
    growth: float = 0.0

    @property
    def closed(self) -> bool:
        """True if the times of later requests depend on the ends of earlier ones."""
        return any(one.after for one in self.requests)

    def scaled(self, factor: float) -> Trace:
        """Return the trace with all lengths multiplied by `factor`, each part at least 1 token."""
        if factor == 1.0:
            return self
        scale = _Scale(factor)
        return replace(self, requests=tuple(map(scale.of, self.requests)))

    def first(self, count: int) -> Trace:
        return replace(self, requests=self.requests[:count])

    def chains(self) -> list[list[int]]:
        """Return the positions of requests, those together that follow the same first one."""
        found: list[list[int]] = []
        chain: list[int] = []
        for position, one in enumerate(self.requests):
            chain.append(chain[one.after[0]] if one.after else len(found))
            if not one.after:
                found.append([])
            found[chain[position]].append(position)
        return found


class _Scale:
    """Multiplier of lengths. A path that several requests share is scaled once."""

    def __init__(self, factor: float):
        self._factor = factor
        self._scaled: dict[TokenPath, TokenPath] = {}

    def of(self, one: Request) -> Request:
        path = self._scaled.get(one.path)
        if path is None:
            lengths = np.maximum(1, np.rint(one.path.lengths * self._factor)).astype(np.int32)
            path = self._scaled[one.path] = TokenPath(one.path.ids, lengths)
        ends = np.concatenate([[0], np.cumsum(path.lengths)])
        starts = np.concatenate([[0], np.cumsum(one.path.lengths)])

        def moved(position: int) -> int:
            return int(ends[np.searchsorted(starts, position)])

        key = None if one.key is None else moved(one.key)
        return replace(one, path=path, key=key, head=moved(one.head), cached=None, restored=0)


class Ids:
    """Assigner of numbers from `first` on to the names of parts, such as hashes of blocks.

    `next`: the number of the next new name.
    """

    def __init__(self, first: int = 1) -> None:
        self.next = first
        self._known: dict[object, int] = {}

    def of(self, name: object) -> int:
        found = self._known.setdefault(name, self.next)
        self.next += found == self.next
        return found

    def new(self) -> int:
        self.next += 1
        return self.next - 1
