"""Parsing of generated tokens into text, thinking and tool calls. Pure Python."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mlxcache.model.markers import (
    NORMAL,
    PLAIN,
    REASONING,
    ROUTED,
    TOOL,
    harmony_route,
    may_be_header,
    read_markers,
)
from mlxcache.model.tool_block import CallReader, ToolBlock
from mlxcache.model.tool_syntax.reading import NO_SYNTAX, Closing
from mlxcache.types import FinishReason, Piece, Text, Thinking, ToolCall

log = logging.getLogger(__name__)

_MOST_BLOCKS = 20  # that are parsed again when a reply ends, so that its end takes linear time
_REREAD = -2  # token id that stands for text which is parsed again


class OutputParser:
    """Parser of one reply: turns tokens into pieces, and decides when the reply ends.

    Without `tools`, tool calls are returned as text. `parallel_tools` False: the first call ends
    the reply. `stop`: strings in visible text that end the reply; with `shows_stop`, they are part
    of it. `stop_tokens`: ids that end it besides the tokenizer's. `thinking_open`: the prompt ends
    inside a think block. `continued`: the prompt ends inside the visible text of a message.
    `generic_tools`: calls are written as `<tool_call>{json}</tool_call>` instead of the model
    family's own syntax. `plain`: all output is text. `prime`: the last tokens of the prompt, if the
    reply continues the prompt's text: without them, a detokenizer removes the space before the
    reply's first word. `id`: that of the request, for the log. `done`: why the reply has ended, or
    None.

    A marker (a string that opens or closes thinking or a tool call) is recognised in one token or
    in many, with two exceptions for text about markers: if the vocabulary has the marker as one
    token, its spelled-out form opens neither thinking in the middle of visible text, nor a tool
    call in thinking. The marker that closes a tool block may also occur in an argument:
    `tool_block` decides, and a call may be held back until more is known.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        parallel_tools: bool = True,
        stop: Sequence[str] = (),
        shows_stop: bool = False,
        stop_tokens: Sequence[int] = (),
        thinking_open: bool = False,
        continued: bool = False,
        generic_tools: bool = False,
        plain: bool = False,
        prime: Sequence[int] = (),
        id: str = "no request",
    ):
        self._id = id
        thinking_open = thinking_open and not plain
        framing = read_markers(tokenizer, tools=bool(tools), generic=generic_tools)
        self._markers = PLAIN if plain else framing
        self._finders = {state: Finder(found) for state, found in self._markers.edges.items()}
        self._eos = {*tokenizer.eos_token_ids, *stop_tokens}
        self._reader = CallReader(self._markers.syntax, tools or ())
        self._parallel = parallel_tools
        self._detokenizer = tokenizer.detokenizer
        prime = list(prime)
        while prime and not tokenizer.decode([prime[-1]]).strip(" "):
            prime.pop()  # a detokenizer holds a blank back, and the reply would begin with it
        for token in prime:
            self._detokenizer.add_token(token)
        _ = self._detokenizer.last_segment  # reading it moves past the primer
        initial = "" if continued else self._markers.initial
        self._state = initial or (REASONING if thinking_open else NORMAL)
        self._visible = Visible(stop, shows_stop, begun=continued and not thinking_open)
        self._thought = Thought()
        self._block: ToolBlock | None = None
        self._framing, self._crossed = "", False
        self._token = -1
        self._out: list[Piece] = []
        self.done: FinishReason | None = None
        self.stop_sequence: str | None = None
        self.reasoning_tokens = 0  # fed while a think block was open, its closing marker included

    @property
    def in_text(self) -> bool:
        """True if the next token is visible text, unless it begins a marker. False after a call."""
        return self._state == NORMAL and not self._reader.calls

    @property
    def thinking(self) -> bool:
        return self._state == REASONING

    def feed(self, token: int) -> list[Piece]:
        """Parse the next token; return the pieces that it completes, none once `done` is set.

        For a token that ends the turn, the result is that of `finish("stop")`.
        """
        if self.done is not None:
            return []
        if token in self._eos:
            return self.finish("stop")
        self.reasoning_tokens += self._state == REASONING
        self._token = token
        self._advance(self._decode(token))
        return self._taken()

    def finish(self, reason: FinishReason) -> list[Piece]:
        """End the reply for `reason`, unless it has ended; return the pieces that were held back.

        Sets `done`: to "tool_calls" if the reply has calls and `reason` is "stop" or "repetition",
        else to `reason`, unless the text held back ends the reply for another reason. An open tool
        block that can be read becomes calls if it may be complete, see `ToolBlock.finished`; else
        it becomes text.
        """
        if self.done is not None:
            return []
        self._token = -1
        self._detokenizer.finalize()
        self._advance(self._detokenizer.last_segment)
        for last in range(_MOST_BLOCKS + 1):
            self._drain()
            if self.done is not None or self._block is None:
                break
            self._end_in_block(self._block, reason, again=last < _MOST_BLOCKS)
            self._advance(self._reread())
        if self.done is None:
            self._flush()
            ended = reason in ("stop", "repetition")  # calls before a loop are whole
            self.done = "tool_calls" if self._reader.calls and ended else reason
        return self._taken()

    def _drain(self) -> None:
        while self.done is None and (held := self._finders[self._state].flush()):
            state = self._state
            self._carry(held)
            if self._state != state:
                self._advance(self._reread())

    def _decode(self, token: int) -> str:
        try:
            self._detokenizer.add_token(token)
        except (IndexError, TypeError):
            # some models have more rows of logits than their tokenizer has tokens
            log.warning("%s: token ignored: id %d is not in the tokenizer", self._id, token)
            return ""
        return str(self._detokenizer.last_segment)

    def _advance(self, text: str) -> None:
        while self.done is None:
            state = self._state
            safe, marker, text = self._finders[state].feed(text)
            self._carry(safe)
            if self._state != state:
                text = self._reread() + (marker or self._finders[state].flush()) + text
            elif marker is None or self.done is not None:
                return
            elif self._is_prose(marker):
                self._carry(marker)
            else:
                self._cross(marker)
                text = self._reread() + text

    def _is_prose(self, marker: str) -> bool:
        if self._token == _REREAD or self._is_token(marker):
            return False
        target = self._markers.edges[self._state][marker]
        if self._state == NORMAL and target == REASONING:
            return self._visible.begun
        if self._state == REASONING and target == TOOL:
            return True
        return self._state in (NORMAL, REASONING) and target not in (NORMAL, TOOL)

    def _is_token(self, marker: str) -> bool:
        """Return whether the newest token is all of `marker`; True if `marker` is no token."""
        return self._markers.tokens.get(marker, self._token) == self._token

    def _carry(self, text: str) -> None:
        if not text:
            return
        if self._state == NORMAL:
            self._say(text)
        elif self._state == REASONING:
            self._emit(Thinking, self._thought.add(text))
        elif self._block is not None:
            self._block.add(text)
            if found := self._block.confirmed():
                end, calls = found
                self._end_block(self._block, end.target, calls, end.after)
        elif self._state != TOOL:
            self._framing += text
            if self._markers.harmony and not may_be_header(self._framing):
                self._state = NORMAL

    def _reread(self) -> str:
        text, self._framing = self._framing, ""
        return text

    def _say(self, text: str) -> None:
        if self._reader.calls:
            if text.strip():
                self.done = "tool_calls"
            return
        self._emit(Text, self._visible.add(text))
        if self._visible.stop is not None:
            self.done, self.stop_sequence = "stop_sequence", self._visible.stop

    def _emit(self, kind: type[Text | Thinking], text: str) -> None:
        if self._out and isinstance(last := self._out[-1], kind):
            self._out[-1] = kind(last.text + text)
        elif text:
            self._out.append(kind(text))

    def _cross(self, marker: str) -> None:
        self._crossed = True
        source, target = self._state, self._markers.edges[self._state][marker]
        if source == TOOL:
            self._close_block(marker, target)
            return
        opening = marker
        if target == ROUTED:
            opening, target = self._framing + marker, harmony_route(self._framing)
        self._framing = ""
        self._state = target
        if target == TOOL:
            self._block = ToolBlock(self._reader, self._markers, opening, source)
        elif target == REASONING:
            if self._reader.calls:
                self.done = "tool_calls"
                return
            self._emit(Text, self._visible.before_thinking())
            self._thought = Thought()
        elif source == REASONING:
            self._visible.after_thinking()

    def _close_block(self, marker: str, target: str) -> None:
        block = self._block
        if block is None:
            self._state = target
            return
        verdict = block.closing()
        if verdict in (Closing.INSIDE, Closing.MAYBE):
            block.close(marker, target, verdict)
        elif calls := block.calls():
            self._end_block(block, target, calls, None)
        elif verdict is Closing.UNKNOWN and not self._is_token(marker):
            # the marker is spelled out inside an argument; its token follows later
            block.add(marker)
        else:
            block.close(marker, target, Closing.INSIDE)
            self._return_block(block, target)

    def _end_in_block(self, block: ToolBlock, reason: FinishReason, *, again: bool) -> None:
        complete = reason == "stop" or self._markers.open_ended
        if found := block.finished(NORMAL, complete=complete):
            end, calls = found
            self._end_block(block, end.target, calls, end.after)
        else:
            self._return_block(block, NORMAL, whole=not again)
            if self.done == "tool_calls" and reason not in ("stop", "repetition"):
                self.done = reason  # the calls before it are whole, but the reply was cut

    def _end_block(
        self, block: ToolBlock, target: str, calls: Sequence[ToolCall], after: int | None
    ) -> None:
        """Add the calls of a tool block to the reply; parse its text from `after` on again."""
        if after is not None and block.goes_on():
            log.warning("%s: text after a complete tool call left out of the reply", self._id)
        self._block, self._state = None, target
        calls = calls if self._parallel else calls[:1]
        if not self._reader.calls:
            self._emit(Text, self._visible.before_call())
        self._reader.take(calls)
        self._out.extend(calls)
        self._read_again(block, after)
        if not self._parallel:
            self.done = "tool_calls"

    def _read_again(self, block: ToolBlock, after: int | None) -> str:
        text, rest = block.split(after)
        if rest:
            self._framing, self._token = rest, _REREAD
        return text

    def _return_block(self, block: ToolBlock, target: str, *, whole: bool = False) -> None:
        """Emit a tool block without a valid call, up to its first closing marker, as text.

        With `whole`, what follows that marker is emitted too.
        """
        text = self._read_again(block, None if whole else block.first)
        if self._markers.syntax is not NO_SYNTAX:
            log.warning(
                "%s: malformed tool call of %d characters returned as text: %s",
                *(self._id, len(text), self._reader.problem),
            )
        self._block = None
        thinking = block.source == REASONING
        self._state = REASONING if thinking else target
        if self._reader.calls:
            self._emit(Text, text)
            self.done = "tool_calls"
        elif thinking:
            self._emit(Thinking, self._thought.add(text))
        else:
            self._say(text)

    def _flush(self) -> None:
        if self._state == REASONING:
            self._emit(Thinking, self._thought.flush())
        if self._reader.calls:
            return
        self._emit(Text, self._visible.flush())
        if self._markers.harmony and "{" in self._framing:
            # arguments of a call whose header is damaged
            self._emit(Text, self._framing)
        elif not (self._markers.harmony or self._visible.begun or self._crossed):
            # the reply lacks the header that its format requires, or was cut off within it
            framing = self._framing.strip()
            if not any(
                marker.startswith(framing) for marker in self._finders[self._state].patterns
            ):
                self._emit(Text, self._framing)

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        return out


def reader(tokenizer: Any) -> Callable[..., list[Piece]]:
    """Make a function `read(ids, **options of OutputParser)` for whole replies, for any thread."""

    def read(ids: Sequence[int], **how: Any) -> list[Piece]:
        parser = OutputParser(tokenizer, **how)
        pieces = [piece for token in ids for piece in parser.feed(token)]
        return [*pieces, *parser.finish("stop")]

    return read


class Finder:
    """Search for the first of several strings in text that arrives in parts.

    The string that is completed first is found; if one character completes several, the longest is.
    So the result does not depend on how the text is divided.
    """

    def __init__(self, patterns: Iterable[str]):
        self.patterns = tuple(dict.fromkeys(p for p in patterns if p))
        self._starts = frozenset(p[0] for p in self.patterns)
        self._reach = max(map(len, self.patterns), default=1) - 1
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """Add text; return the text before the string found, the string, and the rest.

        If no string is found, returns the text that cannot be part of one, None and "". If one is
        found, the rest has not been searched: to search it, the caller feeds it again.
        """
        text = self._held + text
        found = min(
            ((at + len(p), -len(p), p) for p in self.patterns if (at := text.find(p)) >= 0),
            default=None,
        )
        if found is not None:
            end, less, pattern = found
            self._held = ""
            return text[: end + less], pattern, text[end:]
        cut = self._cut(text)
        self._held = text[cut:]
        return text[:cut], None, ""

    def _cut(self, text: str) -> int:
        for at in range(max(0, len(text) - self._reach), len(text)):
            if text[at] in self._starts and any(p.startswith(text[at:]) for p in self.patterns):
                return at
        return len(text)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class Visible:
    """Visible text of a reply: cut at a stop string, and without the template's own newlines.

    Chat templates put newlines between thinking, text and tool calls, and add them again when they
    render the message. So all newlines directly after a think block and one newline directly before
    a tool call are left out. So is white space before a think block or a tool call if the message
    has no other visible text yet. `begun`: the reply continues a message that has visible text.
    """

    def __init__(self, stop: Iterable[str], shows_stop: bool = False, *, begun: bool = False):
        self._finder, self._shows_stop = Finder(stop), shows_stop
        self._held = ""
        self._after_thinking = False
        self._said = begun
        self.begun = begun  # there is text other than white space, emitted or held back
        self.stop: str | None = None

    def add(self, text: str) -> str:
        """Add visible text; return what can be emitted now, text held back before included.

        Sets `stop` if a stop string is complete; no text may be added afterwards.
        """
        if self._after_thinking:
            text = text.lstrip("\n")
            self._after_thinking = not text
        self.begun = self.begun or bool(text.strip())
        safe, self.stop, _ = self._finder.feed(text)
        text = self._held + safe + (self.stop or "" if self._shows_stop else "")
        self._held = ""
        if self.stop is None:
            if not self._said and not text.strip():
                self._held, text = text, ""
            elif text.endswith("\n"):
                self._held, text = "\n", text[:-1]
        return self._out(text)

    def before_thinking(self) -> str:
        text = self.flush()
        return text if self._said else ""

    def after_thinking(self) -> None:
        self._after_thinking = True

    def before_call(self) -> str:
        return self.before_thinking().removesuffix("\n")

    def flush(self) -> str:
        text, self._held = self._held + self._finder.flush(), ""
        return self._out(text)

    def _out(self, text: str) -> str:
        self._said = self._said or bool(text.strip())
        return text


class Thought:
    """Text of one think block, without the newline next to each of its two markers.

    Chat templates write these two newlines themselves. All other text is kept. If the block has
    only white space, its text is empty.
    """

    def __init__(self) -> None:
        self._held = ""
        self._begun = False

    def add(self, text: str) -> str:
        text, self._held = self._held + text, ""
        if not self._begun:
            if not text.strip():
                self._held = text
                return ""
            self._begun = True
            text = text.removeprefix("\n")
        if text.endswith("\n"):
            self._held, text = "\n", text[:-1]
        return text

    def flush(self) -> str:
        text, self._held = self._held if self._begun else "", ""
        return text
