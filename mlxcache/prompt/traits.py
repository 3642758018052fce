"""Detection of the features that a chat template supports, by rendering test conversations."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from mlxcache.errors import MlxcacheError
from mlxcache.prompt.template import Message, Template

S, S2, U, U2, END = "zqsys7", "zqsysb7", "zquser7", "zquserb7", "zqend7"
A, A2, R, R2 = "zqreply7", "zqreplyb7", "zqresult7", "zqresultb7"
"""Words of test conversations, which no template contains."""

NAME, KEY, VALUE = "zqtool7", "zqkey7", "zqvalue7"
LONG_ID, SHORT_ID = "call_zq7zq7zq7zq7zq7", "zq7zq7zq7"

TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {KEY: {"type": "string", "description": "A word."}},
            "required": [KEY],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Traits:
    """Features of a chat template, and its requirements.

    `adapt` rewrites the messages of a request so that they use only these features, and meet the
    requirements.

    Features that it renders completely and in place: `system`: a system message at the start.
    `system_anywhere`: also between and after turns. `developer`: messages of the role `developer`.
    `tools`, `tool_calls`, `tool_role`: descriptions, calls and results of tools. `user_after_tool`:
    a user message after a tool's result. `calls_at_once`: several calls in a message.
    `text_with_calls`: text and calls in one message.

    Requirements: `alternates`: no two user or two assistant messages in a row. `string_arguments`:
    a call's arguments are JSON text, not an object. `absent_content`: a message with only calls has
    no `content`. `short_ids`: call ids have nine letters or digits.
    """

    system: bool = True
    system_anywhere: bool = True
    developer: bool = False
    alternates: bool = False
    tools: bool = False
    tool_calls: bool = False
    tool_role: bool = False
    user_after_tool: bool = True
    string_arguments: bool = False
    calls_at_once: bool = True
    text_with_calls: bool = True
    absent_content: bool = False
    short_ids: bool = False


def probe(template: Template, args: Mapping[str, Any]) -> Traits:
    """Detect the traits of a template; the default ones if the model has no template. Never raises.

    `args`: further arguments of the template, such as `enable_thinking`, to render with.
    """
    if not template.exists:
        return Traits()
    look = _Probe(template, args)
    system = look.shows([_m("system", S), _m("user", U)], S, U)
    passes_any_role = look.shows([_m("zqrole", S), _m("user", U)], S, U)
    tools = look.shows_tool()
    calls = _probe_calls(look)
    call = calls or _Calls()
    results = calls is not None and _results(look, call)
    return Traits(
        system=system,
        system_anywhere=system and _system_anywhere(look),
        developer=look.shows([_m("developer", S), _m("user", U)], S, U)
        and (not passes_any_role or "developer" in (template.source or "")),
        alternates=_alternates(look),
        tools=tools,
        tool_calls=calls is not None,
        tool_role=results and (tools or not passes_any_role),
        user_after_tool=results and _user_after_tool(look, call),
        string_arguments=call.string,
        calls_at_once=calls is None or _calls_at_once(look, call),
        text_with_calls=calls is None or _text_with_calls(look, call),
        absent_content=call.absent,
        short_ids=call.short,
    )


@dataclass(frozen=True, slots=True)
class _Calls:
    """One way to write an assistant's tool calls in a message.

    `string`: arguments as JSON text, else as an object. `absent`: the message has no `content`.
    `short`: call ids of nine characters.
    """

    string: bool = False
    absent: bool = False
    short: bool = False

    def message(self, *, n: int = 1, content: str = "") -> Message:
        arguments: Any = {KEY: VALUE}
        if self.string:
            arguments = json.dumps(arguments)
        ids = [self.id(i) for i in range(n)]
        message: Message = {"role": "assistant"}
        if content or not self.absent:
            message["content"] = content
        message["tool_calls"] = [
            {"id": i, "type": "function", "function": {"name": NAME, "arguments": arguments}}
            for i in ids
        ]
        return message

    def result(self, text: str, number: int = 0) -> Message:
        return {"role": "tool", "content": text, "tool_call_id": self.id(number), "name": NAME}

    def id(self, number: int) -> str:
        return (SHORT_ID if self.short else LONG_ID)[:-1] + str(number)


class _Probe:
    """Renderer of test conversations; the text of one that the template refuses is empty."""

    def __init__(self, template: Template, args: Mapping[str, Any]):
        self._template, self._args = template, args

    def text(self, messages: Sequence[Message], *, tools: bool = False) -> str:
        try:
            return self._template.render(
                messages, tools=[TOOL] if tools else None, generation=False, args=self._args
            )
        except MlxcacheError:
            return ""

    def shows(self, messages: Sequence[Message], *words: str) -> bool:
        """Return whether the rendered `messages` contain the given words, in this order."""
        text, at = self.text(messages), 0
        for word in words:
            at = text.find(word, at) + len(word)
            if at < len(word):
                return False
        return True

    def shows_tool(self) -> bool:
        """Return whether the template renders a tool's name and parameter.

        True only if it also renders the user message of the test conversation.
        """
        texts = (
            self.text(messages, tools=True)
            for messages in ([_m("user", U)], [_m("system", S), _m("user", U)])
        )
        return any(all(word in text for word in (NAME, KEY, U)) for text in texts)


def _m(role: str, content: str) -> Message:
    return {"role": role, "content": content}


# Conversations end with a user message: some templates require the reasoning of a last reply.


def _system_anywhere(look: _Probe) -> bool:
    user, reply, system, end = (
        _m("user", U),
        _m("assistant", A),
        _m("system", S2),
        _m("user", END),
    )
    start = [_m("system", S), user]
    return (
        look.shows([*start, system], S, U, S2)
        and look.shows([*start, system, reply, end], S, U, S2, A, END)
        and look.shows([*start, reply, system, end], S, U, A, S2, END)
        and look.shows([user, system, reply, end], U, S2, A, END)
    )


def _alternates(look: _Probe) -> bool:
    user, reply, end = _m("user", U), _m("assistant", A), _m("user", END)
    users = look.shows([user, _m("user", U2), reply, end], U, U2, A, END)
    return not (users and look.shows([user, reply, _m("assistant", A2), end], U, A, A2, END))


def _probe_calls(look: _Probe) -> _Calls | None:
    """Return the first way of writing a tool call that the template renders as JSON-like text.

    `look`: renders the test conversations. Python's repr of the arguments does not count. Returns
    None if there is no such way.
    """
    for short, absent, string in product((False, True), repeat=3):
        calls = _Calls(string=string, absent=absent, short=short)
        messages = [_m("user", U), calls.message(), calls.result(R)]
        for shown in (messages, messages[:2]):
            text = look.text(shown)
            whole = all(word in text for word in (NAME, KEY, VALUE))
            if whole and repr(KEY) not in text and f'\\"{KEY}' not in text:
                return calls
    return None


def _results(look: _Probe, calls: _Calls) -> bool:
    start = [_m("user", U), calls.message(), calls.result(R)]
    replied = look.shows([*start, _m("assistant", A), _m("user", END)], U, NAME, R, A, END)
    return replied and look.shows(start, U, NAME, R)


def _user_after_tool(look: _Probe, calls: _Calls) -> bool:
    messages = [_m("user", U), calls.message(), calls.result(R), _m("user", U2)]
    return look.shows(messages, U, NAME, R, U2)


def _calls_at_once(look: _Probe, calls: _Calls) -> bool:
    asked = [_m("user", U), calls.message(n=2)]
    results = [calls.result(R), calls.result(R2, 1)]
    return look.shows([*asked, *results], NAME, NAME) or look.shows(asked, NAME, NAME)


def _text_with_calls(look: _Probe, calls: _Calls) -> bool:
    asked = [_m("user", U), calls.message(content=A)]
    return look.shows([*asked, calls.result(R)], A, NAME) or look.shows(asked, A, NAME)
