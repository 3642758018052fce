"""Grammars that replies must follow, for output formats and tool calls, and the guides by them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from mlxcache.errors import BadRequest
from mlxcache.model import json_schema
from mlxcache.model.guidance.guide import Grammars, Guide
from mlxcache.model.guidance.thinking import AfterThinking, ThinkFormat, read_format
from mlxcache.model.lark import Lark, compile_error, escaped, literal, one_of, regex
from mlxcache.model.markers import MESSAGE, is_harmony
from mlxcache.model.tool_syntax.families import grammar_of
from mlxcache.model.tool_syntax.writing import CODE, FREE, PARAM, Signature, arguments_json
from mlxcache.types import Job, OutputFormat

_USER = "user"
_TEXT = "/(?s:.+)/"


class Guides:
    """Factory of the guides of one model's replies. Its methods may be called on any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, label: str = "unnamed"):
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer, vocab_size, label)
        self._lock = Lock()
        self._thinking: list[ThinkFormat | None] = []

    def prepare(self) -> None:
        """Read the vocabulary and the form of thinking, once: blocks for seconds if it is large.

        Raises Unsupported if the model's tokenizer cannot be used.
        """
        self._think_format()

    def make(self, job: Job) -> Guide | None:
        """Return a guide at the beginning of the reply to `job`, or None if the reply is free.

        Blocks, mostly for milliseconds after `prepare`. Raises BadRequest if the format, or the
        schema of a tool, is wrong or cannot be enforced, and Unsupported if the model's tokenizer
        cannot be used or the syntax of its tool calls is unknown.
        """
        text = grammar_text(job, self._tokenizer)
        if text is None:
            return None
        field = job.format.param if job.format is not None else PARAM
        guide, prompt = self._grammars.guide(text, field), job.prompt
        form = None if job.raw else self._think_format()
        if form is None:
            return guide
        closed = prompt.continued or form.is_closed_by(prompt.fed[-32:].tolist())
        may_think = job.thinking_budget != 0 and not closed
        return AfterThinking(form, guide, thinking=prompt.thinking_open, may_think=may_think)

    def _think_format(self) -> ThinkFormat | None:
        with self._lock:
            if not self._thinking:
                self._thinking.append(read_format(self._tokenizer, self._grammars.vocabulary()))
            return self._thinking[0]


def is_constrained(job: Job) -> bool:
    if job.format is not None:
        return True
    return bool(job.tools) and (
        job.tool_choice.required
        or bool(job.tool_choice.names)
        or any(_is_strict(tool) for tool in job.tools or ())
    )


def grammar_text(job: Job, tokenizer: Any) -> str | None:
    """Return the llguidance grammar of the reply to `job`, or None if the reply is free.

    The grammar describes the text after the thinking and the white space that follows it; in
    gpt-oss and Muse Spark that text begins with the header of the next message. Raises what
    `Guides.make` raises.
    """
    if not is_constrained(job):
        return None
    lark = Lark(tokenizer)
    frame = _frame_of(lark, tokenizer)
    form, required = job.format, job.tool_choice.required
    options = []
    if form is not None and not (job.tools and required):
        # the text of a raw completion has no header, that of a continued message had it before
        around = _Frame(lark) if job.raw or job.prompt.continued else frame
        options.append(around.text(_format(lark, form), form.kind))
    if job.tools:
        options.append(_calls(lark, tokenizer, job, frame, free=not (required or options)))
    text = lark.text(one_of(options))
    if form is None or form.kind != "grammar" or required:
        return text
    user = {"name": _USER, "lark_grammar": _lark(form)}
    return json.dumps({"grammars": [{"lark_grammar": text}, user]})


# formats


def _format(lark: Lark, form: OutputFormat) -> str:
    param = _param(form)
    if form.kind == "json_object":
        return lark.json(FREE.text(FREE.root))
    if form.kind == "json_schema":
        try:
            given = json.loads(form.value)
        except (ValueError, RecursionError) as error:
            reason = f"the schema is not JSON: {error}"
            raise BadRequest(reason, param=param, code=json_schema.CODE) from error
        schema = json_schema.check(given, param=param)
        return lark.json(schema.text(schema.root))
    if form.kind == "regex":
        name = lark.terminal(regex(form.value))
        _try(lark.text(name), "regular expression", param)
        return name
    if form.kind == "choice":
        choices = json.loads(form.value)
        if not choices or not all(isinstance(choice, str) for choice in choices):
            raise BadRequest("expected a list of strings to choose from", param=param)
        return lark.terminal(one_of(literal(choice) for choice in choices))
    return f"@{_USER}"


def _param(form: OutputFormat) -> str:
    return form.param or "response_format"


def _lark(form: OutputFormat) -> str:
    try:
        text = any_to_lark(form.value)
    except RecursionError as error:
        message = "invalid grammar (GBNF): it is nested too deeply"
        raise BadRequest(message, param=_param(form)) from error
    except Exception as error:  # its own class, and a bare Exception for a missing rule
        raise BadRequest(f"invalid grammar (GBNF): {error}", param=_param(form)) from error
    _try(text, "grammar", _param(form))
    return text


def _try(grammar: str, what: str, param: str) -> None:
    if (reason := compile_error(grammar)) is not None:
        raise BadRequest(f"invalid {what}: {reason}", param=param)


# tool calls


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return (tool.get("function") or {}).get("strict") is True


def _calls(lark: Lark, tokenizer: Any, job: Job, frame: _Frame, *, free: bool) -> str:
    tools, generic, several = _callable(job), job.prompt.generic_tools, job.parallel_tools
    if isinstance(frame, _Harmony) and not generic:
        return frame.calls(tools, several=several, free=free)
    grammar = grammar_of(tokenizer, generic=generic)
    if free:
        return _anything_but(lark, grammar.opening, grammar.rest(lark, tools, several=several))
    calls = grammar.calls(lark, tools, several=several)
    return frame.text(calls) if generic else frame.block(calls)


def _callable(job: Job) -> list[Signature]:
    forced, names = job.tool_choice.required, job.tool_choice.names
    tools = [
        _signature(tool["function"], checked=forced or _is_strict(tool))
        for tool in job.tools or ()
        if not names or tool["function"]["name"] in names
    ]
    if not tools:
        listed = ", ".join(json.dumps(name) for name in names)
        raise BadRequest(f"none of the tools has a name of {listed}", param="tool_choice")
    return tools


def _signature(function: Mapping[str, Any], *, checked: bool) -> Signature:
    name = str(function["name"])
    if not checked:
        return Signature(name, FREE)
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    at = f"the schema of tool {json.dumps(name)}"
    schema = json_schema.check(parameters, param=PARAM, at=at)
    if "object" not in schema.types(schema.root):
        raise BadRequest(f"{at}: expected an object of arguments", param=PARAM, code=CODE)
    return Signature(name, schema)


@dataclass(frozen=True, slots=True)
class _Frame:
    """Frame around the text and the tool calls of a reply: nothing, or a message header."""

    lark: Lark

    def text(self, body: str, kind: str = "") -> str:
        return body

    def block(self, calls: str) -> str:
        return calls


@dataclass(frozen=True, slots=True)
class _Harmony(_Frame):
    """gpt-oss's messages, whose headers name a channel and, before a call, the tool.

    `call_ends`: the token after a call ends the reply, so that only one call can be made.
    """

    call_ends: bool

    def text(self, body: str, kind: str = "") -> str:
        header = self.lark.marker("<|channel|>final")
        if kind.startswith("json") and "<|constrain|>" in self.lark.added:
            header += f" ({literal(' ')} {self.lark.marker('<|constrain|>json')})?"
        return f"{header} {self.lark.marker(MESSAGE)} {body}"

    def calls(self, tools: Sequence[Signature], *, several: bool, free: bool) -> str:
        if not free:
            return self._sequence(tools, several=several)
        spoken = one_of(
            f"{self.lark.marker(f'<|channel|>{channel}{MESSAGE}')} {_TEXT}"
            for channel in ("analysis", "final", "commentary")
        )
        before = self.lark.rule(f"{spoken} {self.lark.marker('<|end|><|start|>assistant')}")
        return f"{before}* {one_of((spoken, self._sequence(tools, several=several)))}"

    def _sequence(self, tools: Sequence[Signature], *, several: bool) -> str:
        call = self.lark.rule(one_of(map(self._call, tools)))
        if self.call_ends:
            return call
        end = self.lark.marker("<|call|>")
        if not several:
            return f"{call} {end}"
        return f"{call} ({self.lark.marker('<|call|><|start|>assistant')} {call})* {end}"

    def _call(self, tool: Signature) -> str:
        header = f"<|channel|>commentary to=functions.{tool.name} "
        header += "<|constrain|>json" if "<|constrain|>" in self.lark.added else "json"
        return f"{self.lark.marker(header + MESSAGE)} {arguments_json(self.lark, tool)}"


class _Recipients(_Frame):
    """Muse Spark's messages, whose headers name a recipient: ` to=user<|message|>`."""

    def _reply(self, to: str, body: str) -> str:
        return f"{literal(' ')}? {to} {self.lark.marker(MESSAGE)} {body}"

    def text(self, body: str, kind: str = "") -> str:
        return self._reply(literal("to=user"), body)

    def block(self, calls: str) -> str:
        return self._reply(self.lark.terminal(r"/to=[\w.-]{1,64}/"), calls)


def _frame_of(lark: Lark, tokenizer: Any) -> _Frame:
    if is_harmony(tokenizer):
        call = lark.added.get("<|call|>")
        return _Harmony(lark, call_ends=call is None or call in tokenizer.eos_token_ids)
    if tokenizer.response_initial_state == "header":
        return _Recipients(lark)
    return _Frame(lark)


def _anything_but(lark: Lark, opening: str, rest: str) -> str:
    """Return an expression for any text in which the expression `rest` follows each `opening`."""
    first, *later = lark.parts(opening)
    controls = sorted(token for text, token in lark.added.items() if text != first)
    other = [f"<[{','.join(map(str, controls))}]>"] if controls else []
    after = " ".join([*(lark.marker(part) for part in later), rest])
    if first in lark.added:
        part = one_of([_TEXT, *other, f"{lark.marker(first)} {after}"])
        return f"({part})*"
    # the text that opens a call ends this terminal, so what follows it is constrained
    head = lark.lazy(f"/(?s:.*)({escaped(first)})/")
    part = one_of([f"{head} {after}", *(f"{_TEXT} {one}" for one in other), *other])
    return f"({part})* ({_TEXT})?"
