"""Replies as the model wrote them, to be found again when a client sends them back."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import numpy as np

from mlxcache.lru import LRU
from mlxcache.prompt.canonical.argument_order import alike
from mlxcache.prompt.incremental import Anchors
from mlxcache.prompt.tokenizer import ChatTokenizer, thinking_marks, tool_marks
from mlxcache.store.session_rows import ReplyRow
from mlxcache.types import Piece, Prompt, Text, Thinking, Tokens, ToolCall

Tools = Sequence[Mapping[str, Any]]


class Read(Protocol):
    """Reads a reply's ids; see `model.output.reader`."""

    def __call__(
        self,
        ids: Sequence[int],
        *,
        tools: Tools,
        thinking_open: bool,
        generic_tools: bool,
    ) -> Sequence[Piece]: ...


@dataclass(frozen=True, slots=True)
class Said:
    """Text and thinking without white space around them, and each call's name and arguments."""

    text: str
    thinking: str
    calls: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Said:
        """What a reply's pieces say. Raises ValueError where arguments are no JSON."""
        text, thinking, calls = "", "", []
        for piece in pieces:
            if isinstance(piece, Text):
                text += piece.text
            elif isinstance(piece, Thinking):
                thinking += piece.text
            elif isinstance(piece, ToolCall):
                calls.append((piece.name, json.loads(piece.arguments)))
        return cls(text.strip(), thinking.strip(), tuple(calls))

    @classmethod
    def in_message(cls, message: Mapping[str, Any]) -> Said | None:
        """What a message of the assistant's says; None where it is not only text and calls."""
        content, thinking = message.get("content") or "", message.get("reasoning_content") or ""
        if not isinstance(content, str) or not isinstance(thinking, str):
            return None
        functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
        calls = tuple((str(one.get("name")), one.get("arguments")) for one in functions)
        return cls(content.strip(), thinking.strip(), calls)

    def same(self, other: Said) -> bool:
        """Whether both say the same: key order and `1` for `1.0` do not count, all else does."""
        return self.thinking == other.thinking and self.same_but_thinking(other)

    def same_but_thinking(self, other: Said) -> bool:
        """Whether both have the same text and calls."""
        return (
            self.text == other.text
            and len(self.calls) == len(other.calls)
            and all(
                mine[0] == theirs[0] and alike(mine[1], theirs[1])
                for mine, theirs in zip(self.calls, other.calls, strict=True)
            )
        )

    @property
    def strings(self) -> tuple[str, ...]:
        """All of it as texts."""
        calls = (json.dumps(call, ensure_ascii=False) for call in self.calls)
        return (self.text, self.thinking, *calls)


LIMIT = 32 << 20
"""Bytes of replies that are remembered."""

ALTERNATIVES = 8
"""Replies to one prompt that are remembered."""

TAIL = 24
"""Characters of a prompt's end that are looked at before its digest is."""

_OVERHEAD = 512
_STOPPED = 64

_REFUSED = 32
"""Texts, by their hashes, of which it is known that they do not say what a reply does."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as replies are found by it: the digest of its rendered text, without splices, its
    length and its end. `history` is the digest of its messages, empty where nobody asks for it."""

    digest: bytes
    length: int
    tail: str
    history: bytes = b""


class Generated:
    """One reply: its ids, shape (n,), and how they are to be read.

    `calls`: it was read for calls of tools. `stopped`: the stop string that ended it.
    """

    def __init__(
        self,
        asked: Asked,
        ids: Tokens,
        *,
        calls: bool = True,
        thinking_open: bool = False,
        generic_tools: bool = False,
        stopped: str | None = None,
    ):
        self.asked = asked
        self.ids = ids
        self.calls = calls
        self.thinking_open = thinking_open
        self.generic_tools = generic_tools
        self.stopped = stopped
        self.spoken: Spoken | None = None
        self.unusable = False
        self.fitted: Any = None
        self.refused: deque[int] = deque(maxlen=_REFUSED)

    @classmethod
    def of_row(cls, row: ReplyRow) -> Generated:
        """As it was before a restart."""
        return cls(
            Asked(row.digest, row.length, row.tail, row.history),
            row.ids,
            calls=row.calls,
            thinking_open=row.thinking_open,
            generic_tools=row.generic_tools,
            stopped=row.stopped,
        )

    def like(self, other: Generated) -> bool:
        """Whether both are the same ids to one prompt, read alike."""
        mine, theirs = (
            (r.asked, r.calls, r.thinking_open, r.generic_tools, r.stopped) for r in (self, other)
        )
        return mine == theirs and np.array_equal(self.ids, other.ids)

    @property
    def row(self) -> ReplyRow:
        """As it outlives a restart."""
        asked = self.asked
        return ReplyRow(
            *(asked.digest, asked.length, asked.tail, asked.history, self.ids),
            *(self.calls, self.thinking_open, self.generic_tools, self.stopped),
        )

    @property
    def nbytes(self) -> int:
        """Bytes held: ids, and about as much again for each text made of them."""
        return self.ids.nbytes * 6 + _OVERHEAD


@dataclass(frozen=True, slots=True, eq=False)
class Spoken:
    """A reply that was read: its ids, their text with control tokens, and what it says.

    `closing`: the text of the control token that ended it; empty where none did.
    """

    ids: Tokens
    raw: str
    said: Said
    closing: str


class Reading:
    """Reads replies. Safe in any thread.

    `read`: see `model.output.reader`. `never`: the id that stands for a part of an image.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, read: Read, anchors: Anchors, never: int | None = None
    ):
        self.anchors = anchors
        self._read, self._never = read, never
        self._decode, self._encode = tokenizer._tokenizer.decode, tokenizer.encode
        self._thinking = frozenset(thinking_marks(tokenizer))
        self._inner = self._thinking.union(tool_marks(tokenizer))

    def thinks(self, text: str) -> list[str]:
        """The marks of thinking in a text."""
        return [m.group() for m in self.anchors.scan(text) if m.group() in self._thinking]

    def spoken(self, reply: Generated, tools: Sequence[Mapping[str, Any]]) -> Spoken | None:
        """A reply as it is put in again; None where it cannot be. `tools`: of its conversation."""
        if reply.spoken is None and not reply.unusable:
            reply.spoken = self._spoken(reply, tools)
            reply.unusable = reply.spoken is None
        return reply.spoken

    def said(
        self, ids: Sequence[int], reply: Generated, tools: Sequence[Mapping[str, Any]]
    ) -> Said | None:
        """What ids say, read as a reply was; None where that has no clear meaning."""
        try:
            return Said.of(
                self._read(
                    ids,
                    tools=tools if reply.calls else (),
                    thinking_open=reply.thinking_open,
                    generic_tools=reply.generic_tools,
                )
            )
        except (ValueError, RecursionError):
            return None

    def _spoken(self, reply: Generated, tools: Sequence[Mapping[str, Any]]) -> Spoken | None:
        ids = self._before_stop(reply)
        if ids is None or not len(ids) or (ids == self._never).any():
            return None
        raw = self._text(ids)
        found = self.anchors.scan(raw)
        if self.anchors.align(ids, found) is None:
            return None
        said = self.said(ids.tolist(), reply, tools)
        # What was written with a control token, and read as text, comes back as text.
        if said is None or any(self.anchors.scan(text) for text in said.strings):
            return None
        last = found[-1].group() if found and found[-1].end() == len(raw) else ""
        return Spoken(ids, raw, said, "" if last in self._inner else last)

    def _before_stop(self, reply: Generated) -> Tokens | None:
        """The ids before the stop string, what a token has of both written in others; None where
        that cannot be."""
        if not reply.stopped:
            return reply.ids
        text = self._text(reply.ids)
        text = text[: max(text.rfind(reply.stopped), 0)]
        for n in range(len(reply.ids), max(0, len(reply.ids) - _STOPPED), -1):
            kept = self._text(reply.ids[:n])
            if text.startswith(kept):
                return self._written_out(reply.ids[:n], text, text[len(kept) :])
        return None

    def _written_out(self, ids: Tokens, text: str, rest: str) -> Tokens | None:
        """The ids and those of `rest`, if they are `text` together."""
        if rest:
            ids = np.concatenate((ids, self._encode(rest, add_special_tokens=False)))
        return ids if self._text(ids) == text else None

    def _text(self, ids: Tokens) -> str:
        """With every token in it, and no blank moved."""
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._decode(ids.tolist(), **options))


class Replies:
    """The replies of late, bounded in bytes; what was asked for longest ago is forgotten first.

    Safe in any thread.
    """

    def __init__(self, limit: int = LIMIT):
        self._lock = Lock()
        self._held: LRU[bytes, tuple[Generated, ...]] = LRU(limit, _nbytes)
        self._behind: dict[bytes, tuple[Generated, ...]] = {}
        self._places: tuple[Asked, ...] | None = ()

    def put(self, reply: Generated) -> None:
        """Remember a reply beside others to the same prompt."""
        with self._lock:
            others = self._held.peek(reply.asked.digest) or ()
            same = [o for o in others if o.like(reply)]
            reply = same[0] if same else reply  # what was found out about it stays
            kept = [o for o in others if o not in same][-ALTERNATIVES + 1 :]
            for gone in others:
                if gone not in kept:
                    self._forget(gone)
            history = reply.asked.history
            if history:
                self._behind[history] = (*self._behind.get(history, ()), reply)
            for evicted in self._held.put(reply.asked.digest, (*kept, reply)):
                for gone in evicted:
                    self._forget(gone)
            self._places = None

    def learn(self, rows: Iterable[ReplyRow]) -> None:
        """Remember replies that an earlier run or another server wrote, oldest first."""
        for row in rows:
            self.put(Generated.of_row(row))

    def _forget(self, reply: Generated) -> None:
        history = reply.asked.history
        left = tuple(one for one in self._behind.get(history, ()) if one is not reply)
        if left:
            self._behind[history] = left
        else:
            self._behind.pop(history, None)

    def to(self, digest: bytes) -> tuple[Generated, ...]:
        """The replies to a prompt, the newest last."""
        return self._held.get(digest) or ()

    def behind(self, history: bytes) -> tuple[Generated, ...]:
        """The replies behind a conversation, the newest last."""
        return self._behind.get(history, ())

    def places(self, text: str) -> Iterator[int]:
        """The lengths of prompts that a text may begin with, ascending."""
        with self._lock:
            if self._places is None:
                found = {
                    (a.length, a.tail): a for held in self._held.values() for a in [held[0].asked]
                }
                self._places = tuple(found[key] for key in sorted(found))
            places = self._places
        for asked in places:
            if asked.length > len(text):
                return
            if text.startswith(asked.tail, asked.length - len(asked.tail)):
                yield asked.length

    @property
    def nbytes(self) -> int:
        """Bytes that the replies hold."""
        return self._held.total

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))


def _nbytes(replies: tuple[Generated, ...]) -> int:
    return sum(reply.nbytes for reply in replies)


def generated(
    prompt: Prompt, ids: Sequence[int], *, calls: bool, stopped: str | None
) -> Generated | None:
    """A reply to a prompt; None where it could not be found again."""
    asked = getattr(prompt.source, "asked", None)
    if asked is None or not len(ids):
        return None
    return Generated(
        asked,
        np.asarray(ids, np.int32),
        calls=calls,
        thinking_open=prompt.thinking_open,
        generic_tools=prompt.generic_tools,
        stopped=stopped,
    )
