"""Grammars that a reply must follow, for formats and tool calls, as llguidance compiles them."""

from __future__ import annotations

import json
from typing import Any

from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from mlxcache.errors import BadRequest
from mlxcache.model import json_schema
from mlxcache.model.lark import BLANKS, Lark, compile_error, literal, one_of, regex
from mlxcache.model.markers import MESSAGE, is_harmony
from mlxcache.model.schema_facts import Schema
from mlxcache.types import Job, OutputFormat

_USER = "user"


def is_constrained(job: Job) -> bool:
    """Tell if the reply to `job` has to follow a grammar."""
    return job.format is not None


def grammar_text(job: Job, tokenizer: Any) -> str | None:
    """The llguidance grammar of a job's reply, or None if the reply is free.

    It describes what follows the think block. In gpt-oss's format it describes the whole reply, its
    thinking included, because headers come first. `tokenizer` is mlx-lm's TokenizerWrapper. Any
    thread; a large schema takes milliseconds. Raises BadRequest for a schema, expression or grammar
    that is wrong or cannot be enforced.
    """
    if job.format is None:
        return None
    lark = Lark(tokenizer)
    body = _Format(job.format).expression(lark)
    if is_harmony(tokenizer):
        start = _final(lark, job.format, body)
    elif job.prompt.thinking_open:
        start = f"{BLANKS}? {body}"
    else:
        start = body
    text = lark.text(start)
    if job.format.kind != "grammar":
        return text
    user = {"name": _USER, "lark_grammar": _lark(job.format)}
    return json.dumps({"grammars": [{"lark_grammar": text}, user]})


def _param(form: OutputFormat) -> str:
    return form.param or "response_format"


def _lark(form: OutputFormat) -> str:
    """The user's grammar in Lark syntax; llama.cpp's GBNF is converted."""
    try:
        text = any_to_lark(form.value)
    except (GbnfToLarkError, LookupError) as error:
        raise BadRequest(f"invalid grammar (GBNF): {error}", param=_param(form)) from error
    _try(text, "grammar", _param(form))
    return text


class _Format:
    """One format; `expression` adds it to a grammar."""

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
        except ValueError as error:
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
    """Raise BadRequest if llguidance cannot compile a grammar."""
    if (reason := compile_error(grammar)) is not None:
        raise BadRequest(f"invalid {what}: {reason}", param=param)


def _final(lark: Lark, form: OutputFormat, body: str) -> str:
    """A reply of gpt-oss whose final message is `body`, after any thinking."""
    header = lark.marker("<|channel|>final")
    if form.kind.startswith("json") and "<|constrain|>" in lark.added:
        header += f" ({literal(' ')} {lark.marker('<|constrain|>json')})?"
    return f"{thinking(lark)} {header} {lark.marker(MESSAGE)} {body}"


def thinking(lark: Lark) -> str:
    """Messages of gpt-oss that think, before the one that counts."""
    message = lark.rule(
        f"{lark.marker('<|channel|>analysis' + MESSAGE)} /(?s:.+)/ "
        f"{lark.marker('<|end|><|start|>assistant')}"
    )
    return f"{message}*"
