"""Grammars that replies must follow, for output formats and tool calls.

They are written in the form that llguidance compiles.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from mlxcache.errors import BadRequest
from mlxcache.model.guidance import json_schema
from mlxcache.model.guidance.lark import Lark, compile_error, literal, one_of, regex
from mlxcache.model.guidance.reply_frames import Frame, anything_but, frame_of
from mlxcache.model.guidance.schema_facts import Schema
from mlxcache.model.guidance.tool_grammar import read_tool, syntax_of
from mlxcache.types import Job, OutputFormat

_USER = "user"


def is_constrained(job: Job) -> bool:
    """Return whether the reply to `job` has to follow a grammar.

    True if `job` has an output format, or if it has tools and a call is required, only some of the
    tools may be called, or a tool has `strict` true.
    """
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
    gpt-oss and Muse Spark that text begins with the header of the next message. `tokenizer` is
    mlx-lm's TokenizerWrapper. May be called on any thread; a large schema takes milliseconds.
    Raises BadRequest for a schema, expression or grammar that is wrong or cannot be enforced, and
    Unsupported for tool calls of a model family whose syntax is unknown.
    """
    if not is_constrained(job):
        return None
    lark = Lark(tokenizer)
    frame = frame_of(lark, tokenizer)
    options = []
    if job.format is not None and not (job.tools and job.tool_choice.required):
        # the text of a raw completion has no header, that of a continued message had it before
        around = Frame(lark) if job.raw or job.prompt.continued else frame
        options.append(around.text(_Format(job.format).expression(lark), job.format.kind))
    if job.tools:
        calls = _Calls(lark, tokenizer, job, frame)
        if job.tool_choice.required or options:
            options.append(calls.forced())
        else:
            options.append(calls.free())
    body = one_of(options)
    text = lark.text(body)
    if job.format is None or job.format.kind != "grammar" or job.tool_choice.required:
        return text
    user = {"name": _USER, "lark_grammar": _lark(job.format)}
    return json.dumps({"grammars": [{"lark_grammar": text}, user]})


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return (tool.get("function") or {}).get("strict") is True


class _Calls:
    """Writer of grammar expressions for the tool calls that the reply to a job may make.

    `lark`: the grammar to which rules are added. `tokenizer`: mlx-lm's TokenizerWrapper. `frame`:
    the writer of the message headers around calls. Creating one raises BadRequest if no tool has a
    name that the job's tool choice lists, or if a schema cannot be enforced, and Unsupported if the
    syntax of the model's calls is unknown.
    """

    def __init__(self, lark: Lark, tokenizer: Any, job: Job, frame: Frame):
        self._lark = lark
        self._frame = frame
        self._several = job.parallel_tools
        self._generic = job.prompt.generic_tools
        forced, names = job.tool_choice.required, job.tool_choice.names
        self._tools = [
            read_tool(tool, checked=forced or _is_strict(tool))
            for tool in job.tools or ()
            if not names or tool["function"]["name"] in names
        ]
        if not self._tools:
            listed = ", ".join(json.dumps(name) for name in names)
            raise BadRequest(f"none of the tools has a name of {listed}", param="tool_choice")
        self._syntax = (
            None
            if frame.has_recipients and not self._generic
            else syntax_of(tokenizer, generic=self._generic)
        )

    def forced(self) -> str:
        """Return a grammar expression for a reply that consists of tool calls.

        It is one call, or one or more if the job allows several.
        """
        if self._syntax is None:
            return self._frame.calls(self._tools, several=self._several)
        calls = self._syntax.calls(self._lark, self._tools, several=self._several)
        return self._frame.text(calls) if self._generic else self._frame.block(calls)

    def free(self) -> str:
        """Return a grammar expression for any reply in which each tool call is valid."""
        if self._syntax is None:
            return self._frame.free_calls(self._tools, several=self._several)
        rest = self._syntax.rest(self._lark, self._tools, several=self._several)
        return anything_but(self._lark, self._syntax.opening, rest)


def _param(form: OutputFormat) -> str:
    return form.param or "response_format"


def _lark(form: OutputFormat) -> str:
    """Return the user's grammar in Lark syntax, converting it from llama.cpp's GBNF if needed.

    `form`: an output format of kind "grammar". Raises BadRequest if the grammar cannot be compiled.
    """
    try:
        text = any_to_lark(form.value)
    except RecursionError as error:
        message = "invalid grammar (GBNF): it is nested too deeply"
        raise BadRequest(message, param=_param(form)) from error
    except Exception as error:  # its own class, and a bare Exception for a missing rule
        raise BadRequest(f"invalid grammar (GBNF): {error}", param=_param(form)) from error
    _try(text, "grammar", _param(form))
    return text


class _Format:
    """Writer of the grammar for one output format of a request.

    `expression(lark)` adds the rules that it needs to `lark` and returns the expression for the
    reply.
    """

    def __init__(self, form: OutputFormat):
        self._form = form
        self._param = _param(form)

    def expression(self, lark: Lark) -> str:
        return str(getattr(self, f"_{self._form.kind}")(lark))

    def _json_object(self, lark: Lark) -> str:
        return lark.json(Schema({"type": "object"}))

    def _json_schema(self, lark: Lark) -> str:
        try:
            schema = json.loads(self._form.value)
        except (ValueError, RecursionError) as error:
            reason = f"the schema is not JSON: {error}"
            raise BadRequest(reason, param=self._param, code=json_schema.CODE) from error
        return lark.json(json_schema.check(schema, param=self._param))

    def _regex(self, lark: Lark) -> str:
        name = lark.terminal(regex(self._form.value))
        _try(lark.text(name), "regular expression", self._param)
        return name

    def _choice(self, lark: Lark) -> str:
        choices = json.loads(self._form.value)
        if not choices or not all(isinstance(choice, str) for choice in choices):
            raise BadRequest("expected a list of strings to choose from", param=self._param)
        return lark.terminal(one_of(literal(choice) for choice in choices))

    def _grammar(self, lark: Lark) -> str:
        return f"@{_USER}"


def _try(grammar: str, what: str, param: str) -> None:
    """Raise BadRequest if llguidance cannot compile `grammar`.

    `what`: the noun for the grammar in the error's message. `param`: the field of the request that
    the grammar comes from.
    """
    if (reason := compile_error(grammar)) is not None:
        raise BadRequest(f"invalid {what}: {reason}", param=param)
