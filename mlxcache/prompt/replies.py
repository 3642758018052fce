"""Replies as the model generated them, kept to recognise them when a client sends them back.

`replay` puts their token ids into later prompts; this module stores, decodes and compares them.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from threading import Lock
from typing import Any, Protocol

import numpy as np

from mlxcache.lru import LRU
from mlxcache.prompt.blanks import equal_blocks, join_blocks, message_blocks
from mlxcache.prompt.canonical.argument_order import equal_values
from mlxcache.prompt.incremental import ControlTokenFinder
from mlxcache.prompt.tokenizer import ChatTokenizer, thinking_markers, tool_markers
from mlxcache.store.reply_rows import ReplyRow
from mlxcache.types import Piece, Prompt, Text, Tokens, ToolCall, join_ids, token_ids

Tools = Sequence[Mapping[str, Any]]


class ReadReply(Protocol):
    """Interface of a callable that parses the token ids of a whole reply into pieces.

    `tools`: tools that the reply may call. `thinking_open`: the prompt ended inside thinking.
    `generic_tools`: the template does not support tools, so the server described them in the system
    text. The values are those with which the reply was parsed when it was generated. Implemented by
    `model.output.reader`.
    """

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
    """Text, thinking and calls of a reply, independent of its formatting.

    `texts` and `thoughts` are its blocks with their white space; a call is (name, arguments).
    """

    texts: tuple[str, ...]
    thoughts: tuple[str, ...]
    calls: tuple[tuple[str, Any], ...]

    @classmethod
    def of_pieces(cls, pieces: Iterable[Piece]) -> ReplyContent:
        """Return the content of parsed pieces.

        Raises ValueError if the arguments of a call are not JSON.
        """
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
        """Return the content of an assistant message.

        Returns None if the message contains more than text, thinking and calls.
        """
        texts, thinking = message_blocks(message), message.get("reasoning_content") or ""
        if texts is None or not isinstance(thinking, str):
            return None
        functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
        calls = tuple((str(one.get("name")), one.get("arguments")) for one in functions)
        return cls(texts, (thinking,), calls)

    def same(self, other: ReplyContent) -> bool:
        """Return whether text, thinking and calls are equal.

        White space at the edges of blocks, the order of keys, and `1` for `1.0` make no difference.
        """
        return equal_blocks(self.thoughts, other.thoughts) and self.same_except_thinking(other)

    def same_except_thinking(self, other: ReplyContent) -> bool:
        """Return whether text and calls are equal; thinking is ignored."""
        return (
            equal_blocks(self.texts, other.texts)
            and len(self.calls) == len(other.calls)
            and all(
                mine[0] == theirs[0] and equal_values(mine[1], theirs[1])
                for mine, theirs in zip(self.calls, other.calls, strict=True)
            )
        )

    def same_with_thinking_as_text(self, other: ReplyContent) -> bool:
        """Return whether `other` has this reply's calls, and its thinking and text as one text.

        Zed sends thinking back in this form, unless its settings have `interleaved_reasoning`.
        """
        told = replace(self, texts=(*self.thoughts, *self.texts))
        return any(map(str.strip, self.thoughts)) and told.same_except_thinking(other)

    @property
    def strings(self) -> tuple[str, ...]:
        """All strings of the reply: texts, thoughts, and each call as JSON."""
        calls = (json.dumps(call, ensure_ascii=False) for call in self.calls)
        return (*self.texts, *self.thoughts, *calls)


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


@dataclass(frozen=True, slots=True)
class PromptKey:
    """Key of a prompt, to find the replies to it.

    `digest`, `length` and `tail`: digest, number of characters, and last characters of its rendered
    text without splices. `history`: digest of its messages, or empty if replies are not looked up
    by it.
    """

    digest: bytes
    length: int
    tail: str
    history: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class DecodedReply:
    """A reply as token ids, text and content.

    `raw`: text of `ids` with control tokens. `closing`: text of the control token that ended the
    reply, or empty. `key`: 16-byte digest that identifies the reply.
    """

    ids: Tokens
    raw: str
    content: ReplyContent
    closing: str
    key: bytes

    @property
    def text(self) -> str:
        """Text of the reply in one string, its blocks joined."""
        return join_blocks(self.content.texts)

    @property
    def thinking(self) -> str:
        """Thinking of the reply in one string, its blocks joined."""
        return join_blocks(self.content.thoughts)

    @property
    def calls(self) -> tuple[tuple[str, Any], ...]:
        """Tool calls of the reply, as (name, arguments)."""
        return self.content.calls


@dataclass(frozen=True, slots=True)
class RenderedReply:
    """A generated reply as a template rendered it, and the ids that replace that text in a prompt.

    `shown`: the rendered text, which `ids` and their text `raw` replace. `guard`: `shown` and the
    text that must follow it. `closing`: text of the control token that `ids` end with, or empty.
    `changes`: `ids` differ from the encoding of `shown`. `key`: 16-byte digest that identifies the
    reply.
    """

    shown: str
    guard: str
    ids: Tokens
    raw: str
    closing: str
    changes: bool
    key: bytes


_COMPARED = tuple(one.name for one in fields(ReplyRow) if one.name != "ids")


class GeneratedReply:
    """One reply: its row in the database, and cached results of decoding and comparing it."""

    def __init__(self, row: ReplyRow):
        self.row = row
        self._decoded: tuple[DecodedReply | None] | None = None
        self._rendered: RenderedReply | None = None
        self._rejected: deque[int] = deque(maxlen=_MOST_REJECTED)

    @property
    def nbytes(self) -> int:
        """Bytes of memory used: the ids, and an estimate for the texts made of them."""
        return self.row.ids.nbytes * 6 + _OVERHEAD

    def same(self, other: GeneratedReply) -> bool:
        """Return whether both replies have the same ids, prompt and parsing options."""
        same = all(getattr(self.row, name) == getattr(other.row, name) for name in _COMPARED)
        return same and np.array_equal(self.row.ids, other.row.ids)

    def decode_once(self, decode: Callable[[], DecodedReply | None]) -> DecodedReply | None:
        """Return the result of `decode`, which is called only the first time."""
        if self._decoded is None:
            self._decoded = (decode(),)
        return self._decoded[0]

    @property
    def rendered(self) -> RenderedReply | None:
        """Form in which a template last rendered the reply; None until `set_rendered`."""
        return self._rendered

    def set_rendered(self, rendered: RenderedReply) -> None:
        """Remember the form in which a template rendered the reply, to find it faster."""
        self._rendered = rendered

    def is_rejected(self, text: int) -> bool:
        """Return whether a rendered text is among the last 32 that were passed to `reject`.

        `text`: its hash.
        """
        return text in self._rejected

    def reject(self, text: int) -> None:
        """Remember a rendered text that was compared and differs from the reply.

        `text`: its hash.
        """
        self._rejected.append(text)


class ReplyReader:
    """Decodes replies and parses their content. Thread-safe.

    `image_token`: token id that stands for part of an image; a reply that contains it cannot be
    replayed.
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
        """Return the markers in a text that open or close thinking, in order."""
        return [m.group() for m in self.finder.find_all(text) if m.group() in self._thinking]

    def decode(self, reply: GeneratedReply, tools: Tools) -> DecodedReply | None:
        """Decode a reply to a conversation with `tools`; return None if it cannot be replayed."""
        return reply.decode_once(lambda: self._decode_reply(reply, tools))

    def read_content(
        self, ids: Sequence[int], reply: GeneratedReply, tools: Tools
    ) -> ReplyContent | None:
        """Parse `ids` with the options with which `reply` was parsed.

        `ids`: token ids of `reply`, or of a rendered text that may be a copy of it. `tools`: tools
        of the conversation. Returns None if the arguments of a call are not JSON, or are nested too
        deeply.
        """
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

    def _decode_reply(self, reply: GeneratedReply, tools: Tools) -> DecodedReply | None:
        ids = self._ids_before_stop(reply.row)
        if ids is None or not len(ids) or (ids == self._image_token).any():
            return None
        raw = self._text(ids)
        found = self.finder.find_all(raw)
        if self.finder.align(ids, found) is None:
            return None
        content = self.read_content(ids.tolist(), reply, tools)
        # A control token that was parsed as text comes back as text, never as a control token.
        if content is None or any(self.finder.find_all(text) for text in content.strings):
            return None
        last = found[-1].group() if found and found[-1].end() == len(raw) else ""
        closing = "" if last in self._inner else last
        return DecodedReply(ids, raw, content, closing, reply.row.key)

    def _ids_before_stop(self, reply: ReplyRow) -> Tokens | None:
        """Return a reply's ids before its stop string; None if they cannot be separated.

        If one token contains text before the stop string and part of the stop string, other tokens
        are used for that text.
        """
        if not reply.stopped:
            return reply.ids
        text = self._text(reply.ids)
        # The last token completed it and may contain it twice. In text that was held back, as the
        # possible beginning of a marker, it was complete before.
        before = len(self._text(reply.ids[:-1]).rstrip("\ufffd")) - len(reply.stopped) + 1
        at = text.find(reply.stopped, max(before, 0))
        text = text[: at if at >= 0 else max(text.rfind(reply.stopped), 0)]
        for n in range(len(reply.ids), max(0, len(reply.ids) - _MOST_STOP_TOKENS), -1):
            kept = self._text(reply.ids[:n])
            if text.startswith(kept):
                return self._append_text(reply.ids[:n], text, text[len(kept) :])
        return None

    def _append_text(self, ids: Tokens, text: str, rest: str) -> Tokens | None:
        """Append the ids of text `rest` to `ids`.

        Returns None if the result does not decode to `text`, the whole text with `rest` at its end.
        """
        if rest:
            ids = join_ids(ids, token_ids(self._encode(rest, add_special_tokens=False)))
        return ids if self._text(ids) == text else None

    def _text(self, ids: Tokens) -> str:
        """Return the text of token ids, including special tokens and all white space."""
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._decode(ids.tolist(), **options))


class Replies:
    """Recent replies by prompt, limited in bytes; the least recently used are dropped first.

    Thread-safe; no method waits for a disk.
    """

    def __init__(self, limit: int = LIMIT_BYTES):
        self._lock = Lock()
        self._held: LRU[bytes, tuple[GeneratedReply, ...]] = LRU(limit, _nbytes)
        self._by_history: dict[bytes, tuple[GeneratedReply, ...]] = {}
        self._keys: tuple[tuple[int, str], ...] | None = ()

    def add(self, reply: GeneratedReply) -> None:
        """Remember a reply beside other replies to the same prompt, of which the latest are kept.

        At most `ALTERNATIVES` replies are kept for one prompt.
        """
        with self._lock:
            others = self._held.peek(reply.row.digest) or ()
            same = [o for o in others if o.same(reply)]
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
        """Add replies that were stored in the database, in the given order, oldest first.

        They were stored by other servers, or by this one before a restart.
        """
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
        """Return the replies to the prompt whose `PromptKey.digest` is `digest`, newest last.

        This counts as a use of the replies; those used least recently are dropped first.
        """
        return self._held.get(digest) or ()

    def find_by_history(self, history: bytes) -> tuple[GeneratedReply, ...]:
        """Return the replies to prompts whose `PromptKey.history` is `history`, newest last."""
        return self._by_history.get(history, ())

    def prompt_lengths(self, text: str) -> Iterator[int]:
        """Yield the lengths, in characters, of known prompts that may be a prefix of a text.

        They are ascending. Only length and last characters are compared; the caller compares
        digests.
        """
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
        """Bytes of memory used by the replies."""
        return self._held.total


def _nbytes(replies: tuple[GeneratedReply, ...]) -> int:
    return sum(reply.nbytes for reply in replies)


def make_reply(
    prompt: Prompt, ids: Sequence[int], *, calls: bool, stopped: str | None
) -> GeneratedReply | None:
    """Return the reply to a prompt in the form kept for replay.

    `calls`: the reply was parsed for tool calls. `stopped`: the stop string that ended it, or None.
    Returns None for an empty reply, or if the prompt was not rendered from a conversation.
    """
    key = getattr(prompt.source, "key", None)
    if key is None or not len(ids):
        return None
    return GeneratedReply(
        ReplyRow(
            **asdict(key),
            ids=token_ids(ids),
            calls=calls,
            thinking_open=prompt.thinking_open,
            generic_tools=prompt.generic_tools,
            stopped=stopped,
        )
    )
