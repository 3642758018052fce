"""From sampled tokens to text, thinking and tool calls. Pure Python, one parser per reply."""

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
    grammar,
    harmony_route,
    may_be_header,
)
from mlxcache.model.tools import read_calls
from mlxcache.types import FinishReason, Piece, Text, Thinking

log = logging.getLogger(__name__)


class OutputParser:
    """Turns one reply's tokens into pieces, and says when the reply is over.

    `tokenizer` is mlx-lm's TokenizerWrapper. `tools` None or empty: the text of tool calls is
    text. `parallel_tools` False: the first call ends the reply. `stop`: strings that end the
    visible text. `thinking_open`: the prompt ends inside a think block. `generic_tools`: calls
    come as `<tool_call>{json}</tool_call>`. `stop_at_eos` False ignores the end of turn. `plain`:
    no thinking and no calls, all is text. `prime`:
    the prompt's last tokens, for raw completions, where the first token's leading space counts.

    A marker is recognised however the model spells it, in one token or in many, with two
    exceptions for text about markers: thinking that the vocabulary opens with one token does not
    open in the middle of visible text without it, nor does such a tool call in thinking.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        parallel_tools: bool = True,
        stop: Sequence[str] = (),
        thinking_open: bool = False,
        generic_tools: bool = False,
        stop_at_eos: bool = True,
        plain: bool = False,
        prime: Sequence[int] = (),
    ):
        framing = grammar(tokenizer, tools=bool(tools), generic=generic_tools)
        self._grammar = PLAIN if plain else framing
        self._finders = {state: Finder(found) for state, found in self._grammar.edges.items()}
        self._eos = tokenizer.eos_token_ids
        self._stop_at_eos = stop_at_eos
        self._tools = tools or ()
        self._parallel = parallel_tools
        self._detokenizer = tokenizer.detokenizer
        for token in prime:
            self._detokenizer.add_token(token)
        _ = self._detokenizer.last_segment  # reading it moves past the primer
        self._state = self._grammar.initial or (REASONING if thinking_open else NORMAL)
        self._visible = Visible(stop)
        self._thought = Thought()
        self._block, self._opened_by, self._opened_in = "", "", NORMAL
        self._framing, self._crossed = "", False
        self._calls = 0
        self._ids: set[str] = set()
        self._token = -1
        self._out: list[Piece] = []
        self.done: FinishReason | None = None
        """Why the reply is over; None while it goes on. Once set, `feed` ignores tokens."""
        self.stop_sequence: str | None = None
        """The stop string that ended the reply, if one did."""
        self.reasoning_tokens = 0
        """Tokens fed while a think block was open, its closing marker included."""

    def feed(self, token: int) -> list[Piece]:
        """Take the next token; the pieces it completes, in order, often none.

        A token that ends the turn flushes all that was held back, as `finish("stop")` does.
        """
        if self.done is not None:
            return []
        if token in self._eos:
            return self.finish("stop") if self._stop_at_eos else []
        self.reasoning_tokens += self._state == REASONING
        self._token = token
        self._advance(self._decode(token))
        return self._taken()

    def finish(self, reason: FinishReason) -> list[Piece]:
        """End the reply for `reason`; the pieces that were held back. Sets `done`.

        A tool block left open is a call if it parses and the model ended its turn; else it is
        text. Nothing happens if the reply is over already.
        """
        if self.done is not None:
            return []
        self._token = -1
        self._detokenizer.finalize()
        self._advance(self._detokenizer.last_segment)
        while self.done is None and (held := self._finders[self._state].flush()):
            state = self._state
            self._carry(held)
            if self._state != state:
                self._advance(self._reread())
        if self.done is None and self._state == TOOL:
            self._end_block("", NORMAL, complete=reason == "stop" or self._grammar.open_ended)
        if self.done is None:
            self._flush()
            self.done = "tool_calls" if self._calls and reason == "stop" else reason
        return self._taken()

    def _decode(self, token: int) -> str:
        try:
            self._detokenizer.add_token(token)
        except (IndexError, TypeError):
            # Models have rows of padding that name no token.
            log.warning("the model drew token %d, which its tokenizer does not have", token)
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

    def _is_prose(self, marker: str) -> bool:
        """The model writes about a marker, and does not use it."""
        if self._grammar.tokens.get(marker, self._token) == self._token:
            return False
        target = self._grammar.edges[self._state][marker]
        if self._state == NORMAL and target == REASONING:
            return self._visible.begun
        if self._state == REASONING and target == TOOL:
            return True
        return self._state in (NORMAL, REASONING) and target not in (NORMAL, TOOL)

    def _carry(self, text: str) -> None:
        """Text of the current state."""
        if not text:
            return
        if self._state == NORMAL:
            self._say(text)
        elif self._state == REASONING:
            self._think(self._thought.add(text))
        elif self._state == TOOL:
            self._block += text
        else:
            self._framing += text
            if self._grammar.harmony and not may_be_header(self._framing):
                self._state = NORMAL

    def _reread(self) -> str:
        """Framing that turned out to be text."""
        text, self._framing = self._framing, ""
        return text

    def _say(self, text: str) -> None:
        if self._calls:
            if text.strip():
                self.done = "tool_calls"
            return
        self._emit(self._visible.add(text))
        if self._visible.stop is not None:
            self.done, self.stop_sequence = "stop_sequence", self._visible.stop

    def _emit(self, text: str) -> None:
        if self._out and isinstance(last := self._out[-1], Text):
            self._out[-1] = Text(last.text + text)
        elif text:
            self._out.append(Text(text))

    def _think(self, text: str) -> None:
        if self._out and isinstance(last := self._out[-1], Thinking):
            self._out[-1] = Thinking(last.text + text)
        elif text:
            self._out.append(Thinking(text))

    def _cross(self, marker: str) -> None:
        """Follow the edge that `marker` names."""
        self._crossed = True
        source, target = self._state, self._grammar.edges[self._state][marker]
        if source == TOOL:
            self._end_block(marker, target, complete=True)
            return
        opening = marker
        if target == ROUTED:
            opening, target = self._framing + marker, harmony_route(self._framing)
        self._framing = ""
        self._state = target
        if target == TOOL:
            self._block, self._opened_by, self._opened_in = "", opening, source
        elif target == REASONING:
            if self._calls:
                self.done = "tool_calls"
                return
            self._emit(self._visible.before_thinking())
            self._thought = Thought()
        elif source == REASONING:
            self._visible.after_thinking()

    def _end_block(self, marker: str, target: str, *, complete: bool) -> None:
        """The tool block ends with `marker` ("": with the reply); `complete`: it may be a call."""
        parse = self._grammar.parse
        calls = []
        if complete and parse is not None:
            text = self._opened_by + self._block if self._grammar.whole else self._block
            calls = read_calls(parse, text, self._tools, self._calls, self._ids)
        if calls:
            self._call(calls if self._parallel else calls[:1])
            self._state = target
        elif marker and self._grammar.tokens.get(marker, self._token) != self._token:
            # Spelled out inside an argument: the token itself is still to come.
            self._block += marker
        else:
            self._give_back(self._opened_by + self._block + marker)
            self._state = REASONING if self._opened_in == REASONING else target

    def _call(self, calls: Sequence[Piece]) -> None:
        if not self._calls:
            self._emit(self._visible.before_call())
        self._out.extend(calls)
        self._calls += len(calls)
        if not self._parallel:
            self.done = "tool_calls"

    def _give_back(self, text: str) -> None:
        """A block that is no call belongs to the text, or the thinking, that it stood in."""
        if self._calls:
            self._emit(text)
            self.done = "tool_calls"
        elif self._opened_in == REASONING:
            self._think(self._thought.add(text))
        else:
            self._say(text)

    def _flush(self) -> None:
        """Let out what was held back, now that no more comes."""
        if self._state == REASONING:
            self._think(self._thought.flush())
        if self._calls:
            return
        self._emit(self._visible.flush())
        if not (self._grammar.harmony or self._visible.begun or self._crossed):
            # The whole reply lacks the header that its format wants, or was cut off within it.
            framing = self._framing.strip()
            if not any(
                marker.startswith(framing) for marker in self._finders[self._state].patterns
            ):
                self._emit(self._framing)

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        return out


def reader(tokenizer: Any) -> Callable[..., list[Piece]]:
    """Reads the ids of whole replies of `tokenizer`'s model: `read(ids, *, tools, thinking_open,
    generic_tools)` gives their pieces. Safe in any thread."""

    def read(ids: Sequence[int], **how: Any) -> list[Piece]:
        parser = OutputParser(tokenizer, **how)
        pieces = [piece for token in ids for piece in parser.feed(token)]
        return [*pieces, *parser.finish("stop")]

    return read


class Finder:
    """Looks for the first of several strings in text that arrives in pieces.

    The string that is completed first wins, and of several completed by the same character the
    longest. So the outcome does not depend on how the text is cut. What might yet become one of
    them is held back, and nothing else.
    """

    def __init__(self, patterns: Iterable[str]):
        self.patterns = tuple(dict.fromkeys(p for p in patterns if p))
        self._starts = frozenset(p[0] for p in self.patterns)
        self._reach = max(map(len, self.patterns), default=1) - 1
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """The text now known to be free of all strings; the string found, if any; what follows it.

        After a find nothing is held: feed the rest to whoever goes on.
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
        """Where the longest tail that begins one of the strings starts."""
        for at in range(max(0, len(text) - self._reach), len(text)):
            if text[at] in self._starts and self._begins(text[at:]):
                return at
        return len(text)

    def _begins(self, tail: str) -> bool:
        return any(p.startswith(tail) for p in self.patterns)

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held


class Visible:
    """The reply's text as a reader sees it: cut at a stop string, free of template newlines.

    Templates put newlines between thinking, text and tool calls, and put them back when they
    render the message again. So newlines after a think block, one newline before a tool call,
    and blank text that precedes either are not part of the text.
    """

    def __init__(self, stop: Iterable[str]):
        self._finder = Finder(stop)
        self._held = ""
        self._after_thinking = False
        self._said = False
        self.begun = False
        """There is text other than white space, let out or still held."""
        self.stop: str | None = None
        """The stop string that ended the text."""

    def add(self, text: str) -> str:
        """The text to let out now. Once `stop` is set the text is over."""
        if self._after_thinking:
            text = text.lstrip("\n")
            self._after_thinking = not text
        self.begun = self.begun or bool(text.strip())
        safe, self.stop, _ = self._finder.feed(text)
        text = self._held + safe
        self._held = ""
        if self.stop is None:
            if not self._said and not text.strip():
                self._held, text = text, ""
            elif text.endswith("\n"):
                self._held, text = "\n", text[:-1]
        return self._out(text)

    def before_thinking(self) -> str:
        """The text still held, now that a think block begins; none if it is blank."""
        text = self.flush()
        return text if self._said else ""

    def after_thinking(self) -> None:
        """A think block ended: newlines that follow are the template's."""
        self._after_thinking = True

    def before_call(self) -> str:
        """The text still held, now that a tool call follows."""
        return self.before_thinking().removesuffix("\n")

    def flush(self) -> str:
        """The text still held, now that no more comes."""
        text, self._held = self._held + self._finder.flush(), ""
        return self._out(text)

    def _out(self, text: str) -> str:
        self._said = self._said or bool(text.strip())
        return text


class Thought:
    """One think block's text, without the newline after its opening marker and the one before
    its closing marker, which templates write themselves. All else is kept; a blank block is none.
    """

    def __init__(self) -> None:
        self._held = ""
        self._begun = False

    def add(self, text: str) -> str:
        """The text to let out now."""
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
        """The newline still held, where the block ends without its closing marker."""
        text, self._held = self._held if self._begun else "", ""
        return text
