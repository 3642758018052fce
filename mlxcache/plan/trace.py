"""Traces: token counts and shared prefixes of requests, without any text.

Reads three formats, and makes traces of synthetic agents.

- That of `mlxcache trace`: a first line that names it, then one line for each request.
- That of AIPerf's generator of agents: lines of later turns hold only the blocks that are new, and
follow the reply of the turn before.
  Source: https://docs.nvidia.com/aiperf/tutorials/datasets-inputs/agentic-code-dataset-generator
- Mooncake's: each line has all blocks of a prompt.
  Source: https://github.com/kvcache-ai/Mooncake#-open-source-trace
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mlxcache.errors import MlxcacheError
from mlxcache.types import Tokens, token_ids

Ints = npt.NDArray[np.int32]
Form = Literal["mlxcache", "agentic", "mooncake", "synthetic"]

BLOCK_SIZES = (512, 16, 32, 64, 128, 256, 1024)
"""Tokens per block that are tried for a file which does not state them, the usual one first."""

VERSION = 1

MAX_TOKENS = 1 << 27


class TraceError(MlxcacheError):
    pass


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace.

    Its path, that is, prompt and reply, consists of parts: `ids` has the id of each part, from 1
    on, and `lengths` its number of tokens, both int32 of shape (n,). Equal ids stand for equal
    tokens after equal prefixes, so two requests share a prefix as far as their ids agree. The first
    `prompt_parts` parts are the prompt. `time`: arrival, in seconds since the trace began. `delay`:
    seconds from the end of the turn before to this request; None for a request that arrives at its
    `time`. `key`: leading tokens that identify the conversation, None if unknown; `head`: those
    of tools and system prompt. `cached`: tokens that the recorded server reused, None if unknown;
    `restored`: those of them from disk. `took`: seconds that the request took on that server, 0 if
    unknown.
    `strand`: name of the sequence of requests that follow one another; by default the session.
    """

    time: float
    session: str | None
    ids: Ints
    lengths: Ints
    prompt_parts: int
    delay: float | None = None
    key: int | None = None
    head: int = 0
    cached: int | None = None
    restored: int = 0
    took: float = 0.0
    strand: str | None = None

    @property
    def prompt_tokens(self) -> int:
        return int(self.lengths[: self.prompt_parts].sum())

    @property
    def reply_tokens(self) -> int:
        return int(self.lengths[self.prompt_parts :].sum())

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

    `requests`: in the order of their times if `form` is "mlxcache"; those of other files in the
    order of the lines. `growth`: as measured on the recorded server, for its eviction; 0 if
    unknown. See `plan.simulate.Speed`.
    """

    requests: tuple[Request, ...]
    form: Form
    block_tokens: int
    growth: float = 0.0

    @property
    def closed(self) -> bool:
        """True if the times of later turns depend on the ends of earlier ones."""
        return any(one.delay is not None for one in self.requests)

    def scaled(self, factor: float) -> Trace:
        """Return the trace with all lengths multiplied by `factor`, each part at least 1 token."""
        if factor == 1.0:
            return self
        return replace(self, requests=tuple(_scaled(one, factor) for one in self.requests))

    def first(self, count: int) -> Trace:
        return replace(self, requests=self.requests[:count])

    def strands(self) -> list[list[Request]]:
        found: dict[object, list[Request]] = {}
        for number, one in enumerate(self.requests):
            name = one.strand or one.session
            found.setdefault(number if name is None else name, []).append(one)
        return list(found.values())


def _scaled(one: Request, factor: float) -> Request:
    lengths = np.maximum(1, np.rint(one.lengths * factor)).astype(np.int32)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.concatenate([[0], np.cumsum(one.lengths)])

    def moved(position: int) -> int:
        return int(ends[np.searchsorted(starts, position)])

    return replace(
        one,
        lengths=lengths,
        key=None if one.key is None else moved(one.key),
        head=moved(one.head),
        cached=None,
        restored=0,
    )


class Ids:
    """Assigner of numbers from 1 on to the names of parts, such as hashes of blocks."""

    def __init__(self) -> None:
        self._known: dict[object, int] = {}

    def of(self, name: object) -> int:
        return self._known.setdefault(name, len(self._known) + 1)

    def new(self) -> int:
        return self.of(object())


Part = tuple[int, int]


def path_of(parts: Iterable[Part]) -> tuple[Ints, Ints]:
    kept = [part for part in parts if part[1]]
    both = np.array(kept, np.int32).reshape(len(kept), 2)
    return both[:, 0].copy(), both[:, 1].copy()


def read_trace(path: Path, block_tokens: int | None = None) -> Trace:
    """Read a trace in any of the three formats of this module. Raises TraceError.

    `block_tokens`: tokens per block, which the formats of AIPerf and Mooncake do not state; by
    default the first of `BLOCK_SIZES` that fits all lines.
    """
    try:
        with path.open(encoding="utf-8") as file:
            lines = [(n, _object(path, n, text)) for n, text in enumerate(file, 1) if text.strip()]
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not a trace: it is not text in UTF-8.") from error
    if not lines:
        raise TraceError(f"{path} is empty: a trace has one request a line.")
    first = _Line(path, *lines[0])
    if first.fields.get("trace") == "mlxcache":
        return _Recorded(first).read(_Line(path, *one) for one in lines[1:])
    rows = [_Line(path, *one) for one in lines]
    if "hash_ids" not in first.fields:
        raise first.error(
            "is of no known form: expected a line of `mlxcache trace`, or the fields input_length, "
            "output_length and hash_ids"
        )
    size = _block_size(rows, block_tokens)
    agentic = "session_id" in first.fields
    requests = _agentic(rows, size) if agentic else _mooncake(rows, size)
    return Trace(tuple(requests), "agentic" if agentic else "mooncake", size)


def _object(path: Path, number: int, text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}, line {number}: not JSON: {error}.") from error
    if not isinstance(found, dict):
        raise TraceError(f"{path}, line {number}: expected a JSON object.")
    return found


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of a file. Its methods return a field, or raise TraceError for a wrong value."""

    path: Path
    number: int
    fields: Mapping[str, Any]

    def error(self, what: str) -> TraceError:
        return TraceError(f"{self.path}, line {self.number}: {what}.")

    def count(self, name: str, *, least: int = 0, default: int | None = None) -> int:
        """Return a whole number from `least` to `MAX_TOKENS`; None as default makes it required."""
        value = self.fields.get(name, default)
        if type(value) is not int or value < least:
            raise self.error(f"{name} is {value!r}: expected a whole number of {least} or more")
        if value > MAX_TOKENS:
            raise self.error(f"{name} is {value}: expected at most {MAX_TOKENS}")
        return value

    def seconds(self, name: str, scale: float = 1.0, default: float | None = None) -> float:
        """Return a time of 0 or more, divided by `scale` to give seconds."""
        value = self.fields.get(name, default)
        if type(value) not in (int, float) or not 0 <= value < 1e15:
            raise self.error(f"{name} is {value!r}: expected a time of 0 or more")
        return float(value / scale)

    def label(self, name: str) -> str | None:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(f"{name} is {value!r}: expected a text")
        return value

    def list(self, name: str) -> Sequence[Any]:
        value = self.fields.get(name)
        if not isinstance(value, list):
            raise self.error(f"{name} must be a list")
        return value

    def hashes(self) -> Sequence[int | str]:
        found = self.list("hash_ids")
        for one in found:
            if type(one) not in (int, str):
                raise self.error(f"hash_ids holds {one!r}: expected numbers or texts")
        return found


def _block_size(rows: Sequence[_Line], asked: int | None) -> int:
    wrong = rows[0]
    for size in BLOCK_SIZES if asked is None else (asked,):
        for row in rows:
            tokens = row.count("input_length", least=1)
            if len(row.hashes()) != -(-tokens // size):
                wrong = row
                break
        else:
            return size
    tokens, count = wrong.count("input_length"), len(wrong.hashes())
    what = "any usual number of" if asked is None else f"{asked}"
    raise wrong.error(
        f"{tokens} tokens and {count} hash_ids do not agree with {what} tokens per block: "
        "name the right one with --block-tokens"
    )


def _blocks(row: _Line, size: int, ids: Ids) -> list[Part]:
    tokens, hashes = row.count("input_length", least=1), row.hashes()
    lengths = [size] * (len(hashes) - 1) + [tokens - size * (len(hashes) - 1)]
    return [(ids.of(one), length) for one, length in zip(hashes, lengths, strict=True)]


def _mooncake(rows: Iterable[_Line], size: int) -> Iterator[Request]:
    ids = Ids()
    for row in rows:
        prompt = _blocks(row, size, ids)
        reply = row.count("output_length")
        path = path_of([*prompt, (ids.new(), reply)])
        yield Request(row.seconds("timestamp", 1e3), None, *path, len(prompt))


def _agentic(rows: Iterable[_Line], size: int) -> Iterator[Request]:
    ids = Ids()
    paths: dict[str, list[Part]] = {}
    keys: dict[str, int] = {}
    for row in rows:
        session = row.label("session_id")
        if session is None:
            raise row.error("session_id is missing, which the first line has")
        before = paths.get(session)
        parts = [*(before or ()), *_blocks(row, size, ids)]
        reply = row.count("output_length")
        paths[session] = [*parts, (ids.new(), reply)] if reply else parts
        first = before is None
        keys.setdefault(session, row.count("input_length"))
        yield Request(
            row.seconds("timestamp", 1e3, 0.0) if first else 0.0,
            session,
            *path_of(paths[session]),
            len(parts),
            delay=None if first else row.seconds("delay", 1e3, 0.0),
            key=keys[session],
        )


class _Recorded:
    """Reader of the format that `mlxcache trace` writes.

    A block may be divided where a prompt or a reply ended. A part is named after all tokens up to
    its end, so a division that one line has is applied to the same block in all lines.
    """

    def __init__(self, first: _Line):
        version = first.count("version", least=1)
        if version > VERSION:
            raise first.error(
                f"version {version} of the format is newer than {VERSION}: use a newer mlxcache"
            )
        self._size = first.count("block_tokens", least=1)
        self._growth = first.seconds("prefill_growth", default=0.0)
        self._ids = Ids()
        self._last: dict[str | None, list[Part]] = {}
        self._cuts: dict[int, dict[int, int]] = {}
        self._ends: dict[str | None, list[float]] = {}

    def read(self, rows: Iterable[_Line]) -> Trace:
        made = sorted((self._request(row) for row in rows), key=lambda one: one.time)
        cut = (replace_path(one, self._cut(one.ids, one.lengths)) for one in made)
        return Trace(tuple(map(self._placed, cut)), "mlxcache", self._size, self._growth)

    def _request(self, row: _Line) -> Request:
        session, same = row.label("session"), row.count("same", default=0)
        before = self._last.get(session, [])
        if same > len(before):
            raise row.error(
                f"same is {same}, but its session's line before has {len(before)} blocks"
            )
        parts = before[:same] + [self._part(row, one) for one in row.list("blocks")]
        self._last[session] = parts
        self._note_cuts(parts)
        prompt = row.count("prompt_tokens", least=1)
        path = prompt + row.count("generated_tokens")
        ends = np.cumsum([tokens for _, tokens in parts]) if parts else np.zeros(1, int)
        if int(ends[-1]) != path or prompt not in ends:
            raise row.error(
                f"the blocks hold {int(ends[-1])} tokens: expected {path}, with an end after the "
                f"{prompt} of the prompt"
            )
        key = row.count("key") if row.fields.get("key") is not None else None
        head = row.count("head", default=0)
        for name, tokens in (("key", key), ("head", head)):
            if tokens is not None and tokens > path:
                raise row.error(f"{name} is {tokens}, but the request has {path} tokens")
        return Request(
            row.seconds("time"),
            session,
            *path_of(parts),
            int(np.searchsorted(ends, prompt)) + 1,
            key=key,
            head=head,
            cached=row.count("cached_tokens") if "cached_tokens" in row.fields else None,
            restored=row.count("restored_tokens", default=0),
            took=row.seconds("seconds", default=0.0),
        )

    def _part(self, row: _Line, one: Any) -> Part:
        name, tokens = one if isinstance(one, list) and len(one) == 2 else (one, self._size)
        whole = isinstance(tokens, int) and 0 < tokens <= self._size
        if not isinstance(name, str) or not whole:
            raise row.error(
                f"blocks holds {one!r}: expected a hash, or a list of a hash and a number of "
                f"tokens up to {self._size}"
            )
        return self._ids.of(name), tokens

    def _note_cuts(self, parts: Iterable[Part]) -> None:
        within: list[Part] = []
        at = 0
        for id, tokens in parts:
            if within:
                self._cuts.setdefault(id, {}).update(within)
            at = (at + tokens) % self._size
            within = [*within, (at, id)] if at else []

    def _cut(self, ids: Ints, lengths: Ints) -> Iterator[Part]:
        at = 0
        for id, tokens in zip(ids.tolist(), lengths.tolist(), strict=True):
            end = at + tokens
            for position, name in sorted(self._cuts.get(id, {}).items()):
                if at < position < end:
                    yield name, position - at
                    at = position
            yield id, end - at
            at = end % self._size

    def _placed(self, one: Request) -> Request:
        """Return a copy of a request with its strand, and the pause since the request before it.

        The request before it is, among the newest requests of the strands of its session, the one
        that ended last before this one began. If there is none, this one begins a new strand
        without a pause. Call in the order of the requests' times.
        """
        ends = self._ends.setdefault(one.session, [])
        before = max((end for end in ends if end <= one.time), default=None)
        if one.session is None or before is None:
            ends.append(one.time + one.took)
            return replace(one, strand=f"{one.session}/{len(ends)}" if one.session else None)
        at = ends.index(before)
        ends[at] = one.time + one.took
        return replace(one, strand=f"{one.session}/{at + 1}", delay=one.time - before)


def replace_path(one: Request, parts: Iterable[Part]) -> Request:
    ids, lengths = path_of(parts)
    ends = np.cumsum(lengths)
    prompt = int(np.searchsorted(ends, one.prompt_tokens)) + 1
    return replace(one, ids=ids, lengths=lengths, prompt_parts=prompt)


# -- synthetic agents ------------------------------------------------------------------------------

BLOCK = 64
CONTEXT = 100_000
"""Tokens to which conversations grow if nothing else is asked for."""

HEAD, PROJECT = 16_000, 4_000
"""Tokens of tools and system prompt, the same in all conversations, and of a user's project."""

ASKED, REPLIED = 1_200, 300
"""Medians of the new prompt tokens of a turn, and of the tokens of a reply."""

OF_TOOLS, TOOL_S, PERSON_S = 0.75, 2.0, 40.0
"""Share of turns with the result of a tool, and medians of the pauses before those and others."""


def synthetic_trace(users: int, context: int, *, sessions: int = 3, seed: int = 0) -> Trace:
    """Make a trace of `users` users, each with `sessions` conversations one after another.

    Each conversation grows to a random length between half of `context` tokens and all of them.
    Numbers of tokens are log-normal around medians that are usual for coding agents: tools add much
    text, people little, and most turns follow the one before within seconds.
    """
    ids, rng = Ids(), random.Random(seed)
    head, project = min(HEAD, context // 4), min(PROJECT, context // 8)
    made: list[Request] = []
    for number in range(sessions):
        for user in range(users):
            length = int(context * (0.5 + 0.5 * rng.random()))
            parts = [(ids.of("head"), head), (ids.of(("project", user)), project)]
            made += _conversation(f"{user}/{number}", parts, length, ids, rng)
    return Trace(tuple(made), "synthetic", BLOCK)


def _conversation(
    session: str, parts: list[Part], length: int, ids: Ids, rng: random.Random
) -> list[Request]:
    """Return the turns of a conversation of at most `length` tokens, which begins with `parts`.

    The first turn is returned even if it is longer.
    """
    made: list[Request] = []
    head = parts[0][1]
    total, key = sum(tokens for _, tokens in parts), 0
    while True:
        asked = _drawn(rng, ASKED, 1.1)
        replied = _drawn(rng, REPLIED, 0.9)
        if made and total + asked + replied > length:
            return made
        asked = max(8, min(asked, length - total - replied))
        prompt = [*parts, (ids.new(), asked)]
        key = key or total + asked
        parts = [*prompt, (ids.new(), replied)]
        total += asked + replied
        pause = _drawn(rng, TOOL_S if rng.random() < OF_TOOLS else PERSON_S, 0.8, least=0.1)
        delay = pause if made else None
        path = path_of(parts)
        made.append(Request(0.0, session, *path, len(prompt), delay=delay, key=key, head=head))


def _drawn(rng: random.Random, median: float, spread: float, *, least: float = 8) -> int:
    """Draw a log-normal number; `spread` is the standard deviation of its logarithm."""
    return round(max(least, median * rng.lognormvariate(0.0, spread)))
