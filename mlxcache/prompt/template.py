"""The chat template of a model: running it, its errors, and the features that it supports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from jinja2.exceptions import TemplateError

from mlxcache.errors import (
    BadRequest,
    ConfigError,
    ContextLengthExceeded,
    GenerationFailed,
    MlxcacheError,
)
from mlxcache.model.chat_template import LIMIT, TemplateLimit, apply_chat_template
from mlxcache.prompt.tokenizer import ChatTokenizer

Message = dict[str, Any]

TEMPLATE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TemplateError,
    TypeError,
    ValueError,
)

RESERVED = frozenset(
    """
    self messages conversation conversations tools documents chat_template tokenize
    add_generation_prompt continue_final_message sanitize_control_tokens padding truncation
    max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs
    """.split()  # noqa: SIM905 - read as a list of names
)
"""Arguments of transformers' renderer that no request may set."""


class Template:
    """The chat template of a tokenizer; if none `exists`, `render` uses `render_plain`.

    `source`: its Jinja source if known.
    """

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        self.exists = bool(tokenizer.has_chat_template)
        source = getattr(tokenizer._tokenizer, "chat_template", None)
        if isinstance(source, Mapping):
            source = "\n".join(map(str, source.values()))
        self.source: str | None = source if isinstance(source, str) else None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation: bool,
        args: Mapping[str, Any],
    ) -> str:
        """Render a conversation.

        Raises BadRequest with the template's message if it refuses the conversation, or if a value
        is nested too deeply, ContextLengthExceeded for far more text than any context holds, else
        GenerationFailed.
        """
        if not self.exists:
            return render_plain(messages, self._start(), generation=generation)
        try:
            given = {"tools": list(tools) if tools else None, "add_generation_prompt": generation}
            text = apply_chat_template(
                self._tokenizer, list(messages), tokenize=False, **given, **args
            )
        except TimeoutError as error:
            raise GenerationFailed(f"the model's chat template took too long: {error}") from error
        except RecursionError as error:
            raise too_deep() from error
        except TemplateLimit as error:
            if len(str(messages)) > LIMIT // 2:
                raise ContextLengthExceeded(
                    f"prompt is too long: more than {LIMIT // 2:,} characters"
                ) from error
            raise GenerationFailed(f"the model's chat template failed: {error}") from error
        except TEMPLATE_ERRORS as error:
            if type(error) is TemplateError:
                raise BadRequest(
                    f"the model's chat template refuses this conversation: {error}",
                    param="messages",
                ) from error
            raise GenerationFailed(
                f"the model's chat template failed: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(text, str):
            raise GenerationFailed("the model's chat template returned no text")
        return text

    def _start(self) -> str:
        bos = getattr(self._tokenizer, "bos_token", None)
        if not bos:
            return ""
        ids = list(self._tokenizer.encode("a"))
        plain_ids = list(self._tokenizer.encode("a", add_special_tokens=False))
        return str(bos) if ids[: -len(plain_ids)] else ""


def check_arguments(template: Template, args: Mapping[str, Any]) -> None:
    """Raise ConfigError for template arguments that are reserved or make the template fail."""
    own = RESERVED & args.keys()
    if own:
        raise ConfigError(f"--chat-template-args: {min(own)!r} is set by the server; remove it")
    messages = [{"role": "user", "content": "hello"}]
    try:
        template.render(messages, generation=True, args=args)
    except MlxcacheError as error:
        try:
            template.render(messages, generation=True, args={})
        except MlxcacheError:
            return  # the arguments are not the cause
        raise ConfigError(f"--chat-template-args: with these arguments {error}") from error


def too_deep() -> BadRequest:
    return BadRequest("a value is nested too deeply", param="messages")


def render_plain(messages: Sequence[Message], start: str, *, generation: bool) -> str:
    """Render without a chat template: the name of each role, a colon, and the text."""
    parts = [start]
    parts += [f"{message['role'].capitalize()}: {message['content']}\n\n" for message in messages]
    return "".join(parts) + ("Assistant:" if generation else "")


# -- features ----------------------------------------------------------------------------------

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


def message_of(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


TOOL_TURN: tuple[Message, ...] = (
    message_of("user", U),
    message_of("assistant", "")
    | {
        "tool_calls": [
            {"id": SHORT_ID, "type": "function", "function": {"name": NAME, "arguments": {}}}
        ]
    },
    message_of("tool", R) | {"tool_call_id": SHORT_ID},
)
"""A user message, a call and its result."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a chat template renders completely and in place, and what it requires.

    `system_anywhere`: system messages also between and after turns. `user_after_tool`: a user
    message after a tool's result. `calls_at_once`, `text_with_calls`: in one message.

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
    """Detect the traits of a template; default ones if there is none. Never raises."""
    if not template.exists:
        return Traits()
    look = _Probe(template, args)
    system, user, reply = message_of("system", S), message_of("user", U), message_of("assistant", A)
    later, more, again = (
        message_of("system", S2),
        message_of("user", U2),
        message_of("assistant", A2),
    )
    end = message_of("user", END)  # some templates require the reasoning of a last reply
    has_system = look.shows(system, user)
    any_role = look.shows(message_of("zqrole", S), user)
    anywhere = (
        (system, user, later),
        (system, user, later, reply, end),
        (system, user, reply, later, end),
        (user, later, reply, end),
    )
    tools = look.shows_tool(user) or look.shows_tool(system, user)
    calls = look.find_calls(user)
    call = calls or _Calls()
    called, result = (user, call.message()), call.result(R)
    two, told = (user, call.message(n=2)), (user, call.message(content=A))
    results = (
        calls is not None
        and look.shows(*called, result, reply, end)
        and look.shows(*called, result)
    )
    return Traits(
        system=has_system,
        system_anywhere=has_system and all(look.shows(*one) for one in anywhere),
        developer=look.shows(message_of("developer", S), user)
        and (not any_role or "developer" in (template.source or "")),
        alternates=not (look.shows(user, more, reply, end) and look.shows(user, reply, again, end)),
        tools=tools,
        tool_calls=calls is not None,
        tool_role=results and (tools or not any_role),
        user_after_tool=results and look.shows(*called, result, more),
        string_arguments=call.string,
        calls_at_once=calls is None
        or look.has((*two, result, call.result(R2, 1)), NAME, NAME)
        or look.has(two, NAME, NAME),
        text_with_calls=calls is None
        or look.has((*told, result), A, NAME)
        or look.has(told, A, NAME),
        absent_content=call.absent,
        short_ids=call.short,
    )


@dataclass(frozen=True, slots=True)
class _Calls:
    """One way to write an assistant's tool calls; see `Traits`."""

    string: bool = False
    absent: bool = False
    short: bool = False

    def message(self, *, n: int = 1, content: str = "") -> Message:
        arguments = json.dumps({KEY: VALUE}) if self.string else {KEY: VALUE}
        function = {"name": NAME, "arguments": arguments}
        message: Message = {"role": "assistant"}
        if content or not self.absent:
            message["content"] = content
        calls = [{"id": self.id(i), "type": "function", "function": function} for i in range(n)]
        return message | {"tool_calls": calls}

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

    def shows(self, *messages: Message) -> bool:
        """Return whether the content (or call) of each message is rendered, in their order."""
        return self.has(messages, *(message.get("content") or NAME for message in messages))

    def has(self, messages: Sequence[Message], *words: str) -> bool:
        text, at = self.text(messages), 0
        for word in words:
            at = text.find(word, at) + len(word)
            if at < len(word):
                return False
        return True

    def shows_tool(self, *messages: Message) -> bool:
        text = self.text(messages, tools=True)
        return all(word in text for word in (NAME, KEY, U))

    def find_calls(self, user: Message) -> _Calls | None:
        """Return the first way of writing a call that is rendered like JSON, not as `repr`."""
        for short, absent, string in product((False, True), repeat=3):
            calls = _Calls(string=string, absent=absent, short=short)
            for shown in ([user, calls.message(), calls.result(R)], [user, calls.message()]):
                text = self.text(shown)
                whole = all(word in text for word in (NAME, KEY, VALUE))
                if whole and repr(KEY) not in text and f'\\"{KEY}' not in text:
                    return calls
        return None
