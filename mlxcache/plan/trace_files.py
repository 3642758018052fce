"""Files of traces. Four formats are read.

- That of `mlxcache trace`: a first line that names it, then one line for each request.
- Sessions of Claude Code, one object each: all whole blocks of a prompt, and requests of
sub-agents nested. Names of blocks count within a session.
  Source: https://github.com/callanjfox/kv-cache-tester
- That of AIPerf's generator of agents: lines of later turns hold only the blocks that are new, and
follow the reply of the turn before.
  Source: https://docs.nvidia.com/aiperf/tutorials/datasets-inputs/agentic-code-dataset-generator
- Mooncake's: each line has all blocks of a prompt.
  Source: https://github.com/kvcache-ai/Mooncake#-open-source-trace
"""

from __future__ import annotations

import gzip
import json
import reprlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlxcache.errors import MlxcacheError
from mlxcache.plan.trace import Ids, Ints, Part, Request, TokenPath, Trace, path_of

BLOCK_SIZES = (512, 16, 32, 64, 128, 256, 1024)
"""Tokens per block that are tried for a file which does not state them, the usual one first."""

VERSION = 1

MAX_TOKENS = 1 << 27

SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
"""Ends of the names of files that are read from a folder."""


class TraceError(MlxcacheError):
    pass


def read_trace(
    *paths: Path,
    block_tokens: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Trace:
    """Read a trace in any of the formats of this module, with or without gzip. Raises TraceError.

    Several files, and folders, which stand for their files, must be sessions. `block_tokens`:
    tokens per block, which the formats of AIPerf and Mooncake do not state; by default the first of
    `BLOCK_SIZES` that fits all lines. `progress(done, total)` is called after each file.
    """
    files = [file for path in paths for file in _files(path)]
    sessions = _Sessions()
    for count, path in enumerate(files, 1):
        lines = _lines(path)
        if "requests" in lines[0].fields:
            for line in lines:
                sessions.add(line)
        elif len(files) == 1:
            return _trace_of(lines, block_tokens)
        else:
            raise lines[0].error("is no session with requests: give other traces one at a time")
        progress(count, len(files))
    return sessions.trace()


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(one for one in path.iterdir() if one.name.endswith(SUFFIXES))
    if not found:
        raise TraceError(f"{path} has no traces: no file in it ends in {', '.join(SUFFIXES)}.")
    return found


def _trace_of(lines: Sequence[_Line], block_tokens: int | None) -> Trace:
    first = lines[0]
    if first.fields.get("trace") == "mlxcache":
        return _Recorded(first).read(lines[1:])
    if "hash_ids" not in first.fields:
        raise first.error(
            "is of no known form: expected a line of `mlxcache trace`, the field requests, or the "
            "fields input_length, output_length and hash_ids"
        )
    size = _block_size(lines, block_tokens)
    if "session_id" in first.fields:
        return Trace(tuple(_agentic(lines, size)), "agentic", size)
    return Trace(tuple(_mooncake(lines, size)), "mooncake", size)


def _lines(path: Path) -> list[_Line]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            text = file.read().decode()
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path} cannot be read: {reason}.") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not a trace: it is not text in UTF-8.") from error
    lines = [
        _Line(f"{path}, line {number}", _object(path, number, line))
        for number, line in enumerate(_texts(text), 1)
        if line.strip()
    ]
    if not lines:
        raise TraceError(f"{path} is empty: a trace has one request or session a line.")
    return lines


def _texts(text: str) -> list[str]:
    """Return a file's lines, or the whole of it if one object takes several."""
    if text.startswith("{\n") or text.startswith("{\r\n"):
        return [text]
    return text.splitlines()


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
    """An object of a file, and its place. Its methods return a field, or raise TraceError."""

    place: str
    fields: Mapping[str, Any]

    def error(self, what: str) -> TraceError:
        return TraceError(f"{self.place}: {what}.")

    def unlike(self, name: str, expected: str) -> TraceError:
        value = self.fields.get(name)
        what = "missing" if value is None else reprlib.repr(value)
        return self.error(f"{name} is {what}: expected {expected}")

    def count(self, name: str, *, least: int = 0, default: int | None = None) -> int:
        """Return a whole number from `least` to `MAX_TOKENS`; None as default makes it required."""
        value = self.fields.get(name, default)
        if type(value) is not int or value < least:
            raise self.unlike(name, f"a whole number of {least} or more")
        if value > MAX_TOKENS:
            raise self.error(f"{name} is {value}: expected at most {MAX_TOKENS}")
        return value

    def seconds(self, name: str, scale: float = 1.0, default: float | None = None) -> float:
        """Return a time of 0 or more, divided by `scale` to give seconds."""
        value = self.fields.get(name, default)
        if type(value) not in (int, float) or not 0 <= value < 1e15:
            raise self.unlike(name, "a time of 0 or more")
        return float(value / scale)

    def label(self, name: str) -> str | None:
        value = self.fields.get(name)
        if value is not None and not isinstance(value, str):
            raise self.unlike(name, "a text")
        return value

    def list(self, name: str) -> Sequence[Any]:
        value = self.fields.get(name)
        if not isinstance(value, list):
            raise self.unlike(name, "a list")
        return value

    def objects(self, name: str) -> Iterator[_Line]:
        for number, one in enumerate(self.list(name), 1):
            line = _Line(f"{self.place}, {name} {number}", one)
            if not isinstance(one, dict):
                raise line.error("expected a JSON object")
            yield line

    def hashes(self) -> Sequence[int | str]:
        found = self.list("hash_ids")
        if not {int, str}.issuperset(map(type, found)):
            wrong = next(one for one in found if type(one) not in (int, str))
            raise self.error(f"hash_ids holds {wrong!r}: expected numbers or texts")
        return found


# -- blocks of whole prompts -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Blocks of a prompt of `tokens` tokens, the last one maybe partial, and a reply's tokens."""

    hashes: Sequence[int | str]
    tokens: int
    reply: int


Parts = tuple[TokenPath, int, int]
"""A path, how many of its parts are a request's, and how many of these are the prompt's."""


class _Replies:
    """Finder of replies that come back in later prompts, which have them as blocks of their own.

    A later prompt continues an earlier one if it has its last whole block, which no prompt had
    before that one, and is at least as long as its path. What it has behind the earlier prompt then
    begins with the reply. So the earlier path is a beginning of the later prompt, and both have the
    same `TokenPath`. Blocks in which a prompt or a reply ended are divided there, in all prompts.
    """

    def __init__(self, size: int, ids: Ids):
        self._size = size
        self._ids = ids
        self._same: dict[int | str, int | str] = {}
        self._cuts: dict[int | str, set[int]] = {}

    def paths(self, prompts: Sequence[_Prompt]) -> list[Parts]:
        """Return the paths of `prompts`, which are in the order of their times."""
        continued = self._continued(prompts)
        for one, by in zip(prompts, continued, strict=True):
            if by is not None:
                self._divide(one, prompts[by])
        for block, cuts in list(self._cuts.items()):
            if (known_as := self._block(block)) != block:
                self._cuts.setdefault(known_as, set()).update(cuts)
        found: dict[int, Parts] = {}
        for at in reversed(range(len(prompts))):
            by = continued[at]
            found[at] = (
                self._path(prompts[at]) if by is None else _beginning(found[by][0], prompts[at])
            )
        return [found[at] for at in range(len(prompts))]

    def _continued(self, prompts: Sequence[_Prompt]) -> list[int | None]:
        """Return, for each prompt, the position of the first later one that continues it."""
        found: list[int | None] = [None] * len(prompts)
        seen: set[int | str] = set()
        last: dict[int | str, int] = {}
        for position, one in enumerate(prompts):
            blocks = set(one.hashes)
            for block in last.keys() & blocks:
                if self._continues(prompts[last[block]], one):
                    found[last.pop(block)] = position
            whole = one.tokens // self._size
            if whole and one.hashes[whole - 1] not in seen:
                last[one.hashes[whole - 1]] = position
            seen |= blocks
        return found

    def _continues(self, before: _Prompt, one: _Prompt) -> bool:
        whole = before.tokens // self._size
        long = one.tokens >= before.tokens + before.reply
        return long and one.hashes[:whole] == before.hashes[:whole]

    def _divide(self, one: _Prompt, by: _Prompt) -> None:
        for end in (one.tokens, one.tokens + one.reply):
            block, within = divmod(end, self._size)
            if within:
                self._cuts.setdefault(by.hashes[block], set()).add(within)
        if one.tokens % self._size:
            name, whole = one.hashes[-1], self._block(by.hashes[one.tokens // self._size])
            if whole != self._block(name):
                self._same[name] = whole

    def _block(self, name: int | str) -> int | str:
        """Return the name of the longest block known that begins with the block `name`."""
        while name in self._same:
            name = self._same[name]
        return name

    def _path(self, one: _Prompt) -> Parts:
        parts: list[Part] = []
        for number, name in enumerate(one.hashes):
            block, at = self._block(name), 0
            tokens = min(self._size, one.tokens - number * self._size)
            for cut in sorted(self._cuts[block]) if block in self._cuts else ():
                if cut < tokens:
                    parts.append((self._ids.of((block, cut)), cut - at))
                    at = cut
            parts.append((self._ids.of((block, tokens)), tokens - at))
        return *path_of([*parts, (self._ids.new(), one.reply)]), len(parts)


def _beginning(path: TokenPath, prompt: _Prompt) -> Parts:
    """Return the part of a path with which it begins, that of `prompt`."""
    ends = np.cumsum(path.lengths)
    whole, parts = np.searchsorted(ends, (prompt.tokens + prompt.reply, prompt.tokens)) + 1
    return path, int(whole), int(parts)


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
    what = "any usual number of" if asked is None else f"{asked}"
    raise _disagreement(wrong, "input_length", what, ": name the right one with --block-tokens")


def _disagreement(row: _Line, tokens: str, size: str, advice: str = "") -> TraceError:
    return row.error(
        f"{row.count(tokens)} tokens and {len(row.hashes())} hash_ids do not agree with {size} "
        f"tokens per block{advice}"
    )


def _mooncake(rows: Sequence[_Line], size: int) -> Iterator[Request]:
    prompts = [_Prompt(r.hashes(), r.count("input_length"), r.count("output_length")) for r in rows]
    for row, path in zip(rows, _Replies(size, Ids()).paths(prompts), strict=True):
        time = row.seconds("timestamp", 1e3)
        yield Request(time, None, *path)


# -- sessions of Claude Code -----------------------------------------------------------------------


@dataclass(slots=True)
class _Thread:
    """The requests of a main conversation or of a sub-agent, which follow one another.

    `last`: position of its newest request, which ended at `ended`; None before the first. `key`:
    tokens that identify its conversation. `children`: threads of sub-agents that the next request
    may have to wait for.
    """

    parent: _Thread | None
    head: int
    last: int | None = None
    ended: float = 0.0
    key: int = 0
    children: list[_Thread] = field(default_factory=list)


class _Sessions:
    """Reader of sessions. They have no common clock: all begin at 0."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._size = 0
        self._first = 1

    def trace(self) -> Trace:
        return Trace(tuple(self._requests), "sessions", self._size)

    def add(self, line: _Line) -> None:
        size = line.count("block_size", least=1)
        if self._size not in (0, size):
            raise line.error(f"block_size is {size}, and {self._size} in the sessions before")
        self._size = size
        session = line.label("id") or line.place
        main = _Thread(None, self._head(line))
        rows = sorted(self._rows(line, main, 0.0), key=lambda one: one[0])
        ids = Ids(self._first)
        prompts = [self._prompt(row) for _, row, _ in rows]
        paths = _Replies(size, ids).paths(prompts)
        for (time, row, thread), path in zip(rows, paths, strict=True):
            self._requests.append(self._request(session, time, row, thread, path))
        self._first = ids.next

    def _head(self, line: _Line) -> int:
        return line.count("tool_tokens", default=0) + line.count("system_tokens", default=0)

    def _rows(
        self, line: _Line, thread: _Thread, began: float
    ) -> Iterator[tuple[float, _Line, _Thread]]:
        """Yield all requests of a session or a sub-agent with their times and threads."""
        for row in line.objects("requests"):
            time = row.seconds("t") + began
            if "requests" in row.fields:
                child = _Thread(thread, self._head(row))
                inner = [one.seconds("t") for one in row.objects("requests")]
                # times of a sub-agent count from its own beginning, or from the session's
                relative = bool(inner) and inner[0] < row.seconds("t")
                yield from self._rows(row, child, time if relative else began)
            else:
                yield time, row, thread

    def _prompt(self, row: _Line) -> _Prompt:
        tokens, hashes = row.count("in", least=1), row.hashes()
        if len(hashes) != tokens // self._size:
            raise _disagreement(row, "in", f"whole blocks of {self._size}")
        if tokens % self._size:
            # only whole blocks are named; equal rests after equal blocks are taken for the same
            hashes = [*hashes, f"{tokens} tokens up to {hashes[-1:]}"]
        return _Prompt(hashes, tokens, row.count("out"))

    def _request(
        self, session: str, time: float, row: _Line, thread: _Thread, path: Parts
    ) -> Request:
        after, ended = self._before(thread, time)
        delay = max(0.0, time - ended)
        if after and after == (thread.last,):
            delay = row.seconds("think_time", default=delay)
        prompt, took = row.count("in"), row.seconds("api_time", default=0.0)
        one = Request(time, session, *path, after, delay, head=min(thread.head, prompt), took=took)
        before = None if thread.last is None else self._requests[thread.last]
        if before is None or one.shared(before) < thread.key:
            thread.key = prompt
        thread.last, thread.ended = len(self._requests), time + took
        return replace(one, key=thread.key)

    def _before(self, thread: _Thread, time: float) -> tuple[tuple[int, ...], float]:
        """Return the requests that one of `thread` at `time` follows, and the end of the last.

        They are the one before in its thread, or in that of its parent, and the last ones of the
        sub-agents that ended in the meantime.
        """
        ended = [one for one in thread.children if one.last is not None and one.ended <= time]
        thread.children = [one for one in thread.children if one not in ended]
        if thread.last is not None:
            ended.insert(0, thread)
        elif thread.parent is not None:
            thread.parent.children.append(thread)
            if thread.parent.last is not None:
                ended.insert(0, thread.parent)
        after = tuple(one.last for one in ended if one.last is not None)
        return after, max((one.ended for one in ended), default=0.0)


# -- AIPerf's agents -------------------------------------------------------------------------------


def _agentic(rows: Iterable[_Line], size: int) -> Iterator[Request]:
    ids = Ids()
    paths: dict[str, list[Part]] = {}
    keys: dict[str, int] = {}
    last: dict[str, int] = {}
    for position, row in enumerate(rows):
        session = row.label("session_id")
        if session is None:
            raise row.error("session_id is missing, which the first line has")
        tokens, hashes = row.count("input_length", least=1), row.hashes()
        lengths = [size] * (len(hashes) - 1) + [tokens - size * (len(hashes) - 1)]
        new = [(ids.of(one), length) for one, length in zip(hashes, lengths, strict=True)]
        parts = [*paths.get(session, ()), *new]
        reply = row.count("output_length")
        paths[session] = [*parts, (ids.new(), reply)] if reply else parts
        first = session not in last
        keys.setdefault(session, tokens)
        yield Request(
            row.seconds("timestamp", 1e3, 0.0) if first else 0.0,
            session,
            *path_of(paths[session]),
            len(parts),
            after=() if first else (last[session],),
            delay=0.0 if first else row.seconds("delay", 1e3, 0.0),
            key=keys[session],
        )
        last[session] = position


# -- recordings of this server ---------------------------------------------------------------------


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
        self._ends: dict[str, dict[int, float]] = {}

    def read(self, rows: Iterable[_Line]) -> Trace:
        made = sorted((self._request(row) for row in rows), key=lambda one: one.time)
        cut = (_replace_path(one, self._cut(one.ids, one.lengths)) for one in made)
        return Trace(
            tuple(self._placed(*one) for one in enumerate(cut)),
            "mlxcache",
            self._size,
            self._growth,
        )

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

    def _placed(self, position: int, one: Request) -> Request:
        """Return a copy of a request that follows one before it, if any, after the pause since.

        That is, among the newest requests of the session's threads, the one that ended last before
        this one began; without one, this one begins a new thread. Call in the order of times.
        """
        ends = self._ends.setdefault(one.session, {}) if one.session is not None else {}
        earlier = [at for at, end in ends.items() if end <= one.time]
        before = max(earlier, key=lambda at: ends[at], default=None)
        ends[position] = one.time + one.took
        if before is None:
            return one
        return replace(one, after=(before,), delay=one.time - ends.pop(before))


def _replace_path(one: Request, parts: Iterable[Part]) -> Request:
    path, count = path_of(parts)
    prompt = int(np.searchsorted(np.cumsum(path.lengths), one.prompt_tokens)) + 1
    return replace(one, path=path, parts=count, prompt_parts=prompt)
