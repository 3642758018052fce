"""Replies as the model generated them, kept to recognise them when a client sends them back.

`replay` puts their token ids into later prompts; this module stores, decodes and compares them.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Protocol

from mlxcache.lru import LRU
from mlxcache.prompt.canonical.remembered import equal_values
from mlxcache.prompt.incremental import ControlTokenFinder
from mlxcache.prompt.tokenizer import ChatTokenizer, thinking_markers, tool_markers
from mlxcache.store.reply_rows import ReplyRow
from mlxcache.types import TEXTS, Piece, Text, Tokens, ToolCall, join_ids, token_ids

Tools = Sequence[Mapping[str, Any]]


class ReadReply(Protocol):
    """Callable that parses the token ids of a whole reply, such as `model.output.reader`."""

    def __call__(
        self,
        ids: Sequence[int],
        *,
        tools: Tools,
        thinking_open: bool,
        generic_tools: bool,
    ) -> Sequence[Piece]: ...


@dataclass(frozen=True, slots=True)
class ReplyContent:
    """Text, thinking and calls (name, arguments) of a reply, independent of its formatting."""

    texts: tuple[str, ...]
    thoughts: tuple[str, ...]
    calls: tuple[tuple[str, Any], ...]

    @classmethod
    def of_pieces(cls, pieces: Iterable[Piece]) -> ReplyContent:
        """Return the content of pieces. Raises ValueError if a call's arguments are not JSON."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[tuple[str, Any]] = []
        growing: list[str] | None = None
        for piece in pieces:
            if isinstance(piece, ToolCall):
                calls.append((piece.name, json.loads(piece.arguments)))
                growing = None
                continue
            blocks = texts if isinstance(piece, Text) else thoughts
            if blocks is growing:
                blocks[-1] += piece.text
            else:
                blocks.append(piece.text)
            growing = blocks
        return cls(tuple(texts), tuple(thoughts), tuple(calls))

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> ReplyContent | None:
        """Return the content of an assistant message; None if its content is not text."""
        text, thinking = message.get("content") or "", message.get("reasoning_content") or ""
        if not isinstance(text, str) or not isinstance(thinking, str):
            return None
        texts = tuple(message.get(TEXTS, (text,)))
        functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
        calls = tuple((str(one.get("name")), one.get("arguments")) for one in functions)
        return cls(texts, (thinking,), calls)

    def same(self, other: ReplyContent) -> bool:
        """Return whether text, thinking and calls are equal."""
        return equal_blocks(self.thoughts, other.thoughts) and self.same_except_thinking(other)

    def same_except_thinking(self, other: ReplyContent) -> bool:
        return (
            equal_blocks(self.texts, other.texts)
            and len(self.calls) == len(other.calls)
            and all(
                mine[0] == theirs[0] and equal_values(mine[1], theirs[1])
                for mine, theirs in zip(self.calls, other.calls, strict=True)
            )
        )

    def same_with_thinking_as_text(self, other: ReplyContent) -> bool:
        """Return whether `other` has thinking and text as one text, as Zed sends a reply back."""
        told = replace(self, texts=(*self.thoughts, *self.texts))
        return any(map(str.strip, self.thoughts)) and told.same_except_thinking(other)


LIMIT_BYTES = 32 << 20
"""Most bytes of replies that are remembered."""

ALTERNATIVES = 16
"""Most replies to one prompt that are remembered."""

TAIL_CHARACTERS = 24
"""Number of last characters of a prompt that are compared before its digest is computed."""

_OVERHEAD = 512
"""Bytes of memory that a reply is assumed to use besides its ids and texts."""

_MOST_STOP_TOKENS = 64
"""Number of tokens at the end of a reply among which its stop string may begin."""

_MOST_REJECTED = 32
"""Most hashes kept per reply, of texts with a different content."""

SEPARATOR = "\n\n"
"""Text put between two text blocks that have no white space where they meet."""

_RUNS = re.compile(r"(\s+)|\S+")


@dataclass(frozen=True, slots=True)
class PromptKey:
    """Digest, length and last characters of a prompt's text, and digest of its messages."""

    digest: bytes
    length: int
    tail: str
    history: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedReply:
    """A reply as token ids, text and content.

    `raw`: text of `ids` with control tokens. `closing`: the last of them, if it ended the reply.
    """

    ids: Tokens
    raw: str
    content: ReplyContent
    closing: str
    key: bytes

    @property
    def text(self) -> str:
        return join_blocks(self.content.texts)

    @property
    def thinking(self) -> str:
        return join_blocks(self.content.thoughts)


@dataclass(frozen=True, slots=True)
class RenderedReply:
    """A generated reply as a template rendered it, and the ids that replace that text in a prompt.

    `guard`: `shown` and what must follow it. `raw`: text of `ids`. `closing`: text of the control
    token that they end with, or empty. `changes`: `ids` differ from the encoding of `shown`.
    """

    shown: str
    guard: str
    ids: Tokens
    raw: str
    closing: str
    changes: bool
    key: bytes


class GeneratedReply:
    """One reply: its row in the database, and cached results of decoding and comparing it.

    `rendered`: form in which a template last rendered it. `rejected`: hashes of texts that were
    compared lately and differ from it.
    """

    def __init__(self, row: ReplyRow):
        self.row = row
        self.rendered: RenderedReply | None = None
        self.rejected: deque[int] = deque(maxlen=_MOST_REJECTED)
        self._decoded: tuple[DecodedReply | None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory used: the ids, and an estimate for the texts made of them."""
        return self.row.ids.nbytes * 6 + _OVERHEAD

    def decode(self, reader: ReplyReader, tools: Tools) -> DecodedReply | None:
        """Decode a reply to a conversation with `tools`; return None if it cannot be replayed."""
        if self._decoded is None:
            self._decoded = (reader.decode(self, tools),)
        return self._decoded[0]

    def set_rendered(self, rendered: RenderedReply) -> None:
        self.rendered = rendered


class ReplyReader:
    """Decodes replies and parses their content. Thread-safe.

    A reply that contains an `image_token` cannot be replayed.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        read: ReadReply,
        finder: ControlTokenFinder,
        image_token: int | None = None,
    ):
        self.finder = finder
        self._read, self._image_token = read, image_token
        self._decode, self._encode = tokenizer._tokenizer.decode, tokenizer.encode
        self._thinking = frozenset(thinking_markers(tokenizer))
        self._inner = self._thinking.union(tool_markers(tokenizer))

    def find_thinking_markers(self, text: str) -> list[str]:
        return [m.group() for m in self.finder.find_all(text) if m.group() in self._thinking]

    def read_content(
        self, ids: Sequence[int], reply: GeneratedReply, tools: Tools
    ) -> ReplyContent | None:
        """Parse `ids` with the options with which `reply` was parsed; None if calls are no JSON."""
        try:
            return ReplyContent.of_pieces(
                self._read(
                    ids,
                    tools=tools if reply.row.calls else (),
                    thinking_open=reply.row.thinking_open,
                    generic_tools=reply.row.generic_tools,
                )
            )
        except (ValueError, RecursionError):
            return None

    def decode(self, reply: GeneratedReply, tools: Tools) -> DecodedReply | None:
        ids = self._ids_before_stop(reply.row)
        if ids is None or not len(ids) or (ids == self._image_token).any():
            return None
        raw = self._text(ids)
        found = self.finder.find_all(raw)
        if self.finder.align(ids, found) is None:
            return None
        content = self.read_content(ids.tolist(), reply, tools)
        if content is None:
            return None
        last = found[-1].group() if found and found[-1].end() == len(raw) else ""
        shown = any(text.endswith(last) for text in (*content.texts, *content.thoughts))
        closing = "" if shown or last in self._inner else last
        return DecodedReply(ids, raw, content, closing, reply.row.key)

    def _ids_before_stop(self, reply: ReplyRow) -> Tokens | None:
        """Return a reply's ids before its stop string; None if they cannot be separated."""
        if not reply.stopped:
            return reply.ids
        text = self._text(reply.ids)
        # The last token completed it and may contain it twice. In text that was held back, as the
        # possible beginning of a marker, it was complete before.
        before = len(self._text(reply.ids[:-1]).rstrip("\ufffd")) - len(reply.stopped) + 1
        at = text.find(reply.stopped, max(before, 0))
        text = text[: at if at >= 0 else max(text.rfind(reply.stopped), 0)]
        for n in range(len(reply.ids), max(0, len(reply.ids) - _MOST_STOP_TOKENS), -1):
            ids = reply.ids[:n]
            kept = self._text(ids)
            if text.startswith(kept):
                if rest := text[len(kept) :]:
                    ids = join_ids(ids, token_ids(self._encode(rest, add_special_tokens=False)))
                return ids if self._text(ids) == text else None
        return None

    def _text(self, ids: Tokens) -> str:
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._decode(ids.tolist(), **options))


class Replies:
    """Recent replies by prompt; the least recently used are dropped first.

    Thread-safe; no method waits for a disk.
    """

    def __init__(self, limit: int = LIMIT_BYTES):
        self._lock = Lock()
        self._held: LRU[bytes, tuple[GeneratedReply, ...]] = LRU(
            limit, lambda replies: sum(reply.nbytes for reply in replies)
        )
        self._by_history: dict[bytes, tuple[GeneratedReply, ...]] = {}
        self._keys: tuple[tuple[int, str], ...] | None = ()

    def add(self, reply: GeneratedReply) -> None:
        """Remember a reply; of replies to one prompt, the latest `ALTERNATIVES` are kept."""
        with self._lock:
            others = self._held.peek(reply.row.digest) or ()
            same = [o for o in others if o.row.key == reply.row.key]
            reply = same[0] if same else reply  # keeps what decoding found out
            kept = [o for o in others if o not in same][-ALTERNATIVES + 1 :]
            for gone in others:
                if gone not in kept:
                    self._forget(gone)
            history = reply.row.history
            if history:
                self._by_history[history] = (*self._by_history.get(history, ()), reply)
            for evicted in self._held.put(reply.row.digest, (*kept, reply)):
                for gone in evicted:
                    self._forget(gone)
            self._keys = None

    def learn(self, rows: Iterable[ReplyRow]) -> None:
        """Add replies of other servers, or of before a restart, oldest first."""
        for row in rows:
            self.add(GeneratedReply(row))

    def _forget(self, reply: GeneratedReply) -> None:
        history = reply.row.history
        left = tuple(one for one in self._by_history.get(history, ()) if one is not reply)
        if left:
            self._by_history[history] = left
        else:
            self._by_history.pop(history, None)

    def find(self, digest: bytes) -> tuple[GeneratedReply, ...]:
        """Return the replies to the prompt with the `PromptKey.digest` `digest`, newest last."""
        return self._held.get(digest) or ()

    def find_by_history(self, history: bytes) -> tuple[GeneratedReply, ...]:
        """Return the replies to prompts with the `PromptKey.history` `history`, newest last."""
        return self._by_history.get(history, ())

    def prompt_lengths(self, text: str) -> Iterator[int]:
        """Yield, ascending, the lengths of known prompts with an end as in `text`."""
        with self._lock:
            if self._keys is None:
                rows = [held[0].row for held in self._held.values()]
                self._keys = tuple(sorted({(row.length, row.tail) for row in rows}))
            keys_by_length = self._keys
        for length, tail in keys_by_length:
            if length > len(text):
                return
            if text.startswith(tail, length - len(tail)):
                yield length

    @property
    def nbytes(self) -> int:
        return self._held.total


# -- white space at the edges of text blocks, which clients strip, add or replace --------------


def join_blocks(blocks: Iterable[str]) -> str:
    """Join text blocks, with a blank line between two that have no white space where they meet."""
    joined = ""
    for block in blocks:
        if not block.strip():
            continue
        touching = joined and not joined[-1].isspace() and not block[0].isspace()
        joined += SEPARATOR + block if touching else block
    return joined


def equal_blocks(a: Sequence[str], b: Sequence[str]) -> bool:
    """Return whether two texts are equal except for white space at the edges of their blocks.

    White space inside a block must be equal, unless the other text has the edge of a block at that
    place.
    """
    mine, theirs = _stripped(a), _stripped(b)
    if mine == theirs:
        return True
    if len(mine) <= 1 and len(theirs) <= 1:
        return False
    solid, gaps, edges = _split_blanks(mine)
    other, other_gaps, other_edges = _split_blanks(theirs)
    return solid == other and all(
        gaps.get(at) == other_gaps.get(at)
        for at in gaps.keys() | other_gaps.keys()
        if at not in edges and at not in other_edges
    )


def _stripped(blocks: Iterable[str]) -> list[str]:
    return [text for block in blocks if (text := block.strip())]


def _split_blanks(blocks: Sequence[str]) -> tuple[str, dict[int, str], set[int]]:
    """Return the characters of blocks, and by their number before, gaps and edges."""
    words: list[str] = []
    gaps: dict[int, str] = {}
    edges: set[int] = set()
    at = 0
    for block in blocks:
        edges.add(at)
        for run in _RUNS.finditer(block):
            if run.group(1):
                gaps[at] = run.group()
            else:
                words.append(run.group())
                at += len(run.group())
    return "".join(words), gaps, edges
