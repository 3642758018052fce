"""Frames around the text and the tool calls of a reply: nothing, or a message header."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxcache.model.guidance.lark import Lark, escaped, literal, one_of
from mlxcache.model.guidance.tool_grammar import arguments_json
from mlxcache.model.guidance.tool_members import Tool
from mlxcache.model.markers import MESSAGE, is_harmony

TEXT = "/(?s:.+)/"


class Frame:
    """Writer of grammar expressions for replies without message headers.

    `lark`: the grammar to which rules are added. Subclasses add the headers of a model family
    around text and tool calls.
    """

    has_recipients = False
    """True if the header of a call names the tool."""

    def __init__(self, lark: Lark):
        self.lark = lark

    def text(self, body: str, kind: str = "") -> str:
        """Return a grammar expression for a reply whose visible text matches the expression `body`.

        `kind`: the kind of output format, such as "json_schema", or ""; a header may name it.
        """
        return body

    def block(self, calls: str) -> str:
        """Return a grammar expression for a reply that consists only of the tool calls `calls`.

        `calls` is an expression too.
        """
        return calls

    def calls(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Return a grammar expression for calls of `tools`, each a message with its own header.

        With `several`, more than one call may be made. Only subclasses for families whose headers
        name the tool implement it. It raises NotImplementedError for the others, whose calls are
        written by a `Syntax`.
        """
        raise NotImplementedError

    def free_calls(self, tools: Sequence[Tool], *, several: bool) -> str:
        """Return a grammar expression for any messages, in which each call is one of `tools`.

        With `several`, more than one call may be made. Only subclasses for families whose headers
        name the tool implement it. It raises NotImplementedError for the others.
        """
        raise NotImplementedError


class Harmony(Frame):
    """Writer of grammar expressions for gpt-oss's messages.

    Their headers name a channel and, before a call, the tool. `call_ends`: True if the token that
    the model writes after a call ends the reply, so that only one call can be made.
    """

    has_recipients = True

    def __init__(self, lark: Lark, *, call_ends: bool):
        super().__init__(lark)
        self._call_ends = call_ends
        """True if the token after a call ends the turn."""

    def _message(self, channel: str) -> str:
        return f"{self.lark.marker(f'<|channel|>{channel}{MESSAGE}')} {TEXT}"

    def _next(self, end: str = "<|end|>") -> str:
        return self.lark.marker(f"{end}<|start|>assistant")

    def text(self, body: str, kind: str = "") -> str:
        header = self.lark.marker("<|channel|>final")
        if kind.startswith("json") and "<|constrain|>" in self.lark.added:
            header += f" ({literal(' ')} {self.lark.marker('<|constrain|>json')})?"
        return f"{header} {self.lark.marker(MESSAGE)} {body}"

    def calls(self, tools: Sequence[Tool], *, several: bool) -> str:
        return self._sequence(tools, several=several)

    def free_calls(self, tools: Sequence[Tool], *, several: bool) -> str:
        spoken = one_of(map(self._message, ("analysis", "final", "commentary")))
        before = self.lark.rule(f"{spoken} {self._next()}")
        return f"{before}* {one_of((spoken, self._sequence(tools, several=several)))}"

    def _sequence(self, tools: Sequence[Tool], *, several: bool) -> str:
        call = self.lark.rule(one_of(map(self._call, tools)))
        if self._call_ends:
            return call
        end = self.lark.marker("<|call|>")
        if not several:
            return f"{call} {end}"
        return f"{call} ({self._next('<|call|>')} {call})* {end}"

    def _call(self, tool: Tool) -> str:
        header = f"<|channel|>commentary to=functions.{tool.name} "
        header += "<|constrain|>json" if "<|constrain|>" in self.lark.added else "json"
        return f"{self.lark.marker(header + MESSAGE)} {arguments_json(self.lark, tool)}"


class Recipients(Frame):
    """Writer of grammar expressions for Muse Spark's messages.

    Their headers name a recipient: ` to=user<|message|>`.
    """

    def _reply(self, to: str, body: str) -> str:
        return f"{literal(' ')}? {to} {self.lark.marker(MESSAGE)} {body}"

    def text(self, body: str, kind: str = "") -> str:
        return self._reply(literal("to=user"), body)

    def block(self, calls: str) -> str:
        return self._reply(self.lark.terminal(r"/to=[\w.-]{1,64}/"), calls)


def frame_of(lark: Lark, tokenizer: Any) -> Frame:
    """Return the writer of the headers around text and tool calls of a model's replies.

    `lark`: the grammar to which it adds rules. `tokenizer`: mlx-lm's TokenizerWrapper.
    """
    if is_harmony(tokenizer):
        call = lark.added.get("<|call|>")
        return Harmony(lark, call_ends=call is None or call in tokenizer.eos_token_ids)
    if tokenizer.response_initial_state == "header":
        return Recipients(lark)
    return Frame(lark)


def anything_but(lark: Lark, opening: str, rest: str) -> str:
    """Return a grammar expression for any text in which `rest` follows each `opening`.

    `opening`: a text, such as the marker of a tool call. `rest`: the expression that must match
    after it. The text may contain control tokens.
    """
    first, *later = lark.parts(opening)
    controls = sorted(token for text, token in lark.added.items() if text != first)
    other = [f"<[{','.join(map(str, controls))}]>"] if controls else []
    after = " ".join([*(lark.marker(part) for part in later), rest])
    if first in lark.added:
        part = one_of([TEXT, *other, f"{lark.marker(first)} {after}"])
        return f"({part})*"
    # the text that opens a call ends this terminal, so what follows it is constrained
    head = lark.lazy(f"/(?s:.*)({escaped(first)})/")
    part = one_of([f"{head} {after}", *(f"{TEXT} {one}" for one in other), *other])
    return f"({part})* ({TEXT})?"
