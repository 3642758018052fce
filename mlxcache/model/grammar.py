"""Grammars of replies: what llguidance compiles for a request's format.

Raises and returns text alone; `model.guide` compiles it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from mlxcache.errors import BadRequest
from mlxcache.types import Job, OutputFormat

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions


def is_constrained(job: Job) -> bool:
    """Tell if the reply to `job` has to follow a grammar."""
    return job.format is not None


def grammar_text(job: Job, tokenizer: Any) -> str | None:
    """The grammar that the reply to `job` follows once it has thought; None: free.

    A Lark grammar, or llguidance's JSON form. Raises BadRequest.
    """
    return format_grammar(job.format) if job.format is not None else None


BLANKS: JsonCompileOptions = {"whitespace_pattern": r"[ \n]{0,20}"}
"""White space between the parts of JSON; without a limit a weak model writes nothing else."""


def format_grammar(form: OutputFormat) -> str:
    """The grammar of text in the form `form`. Raises BadRequest."""
    if form.kind == "json_object":
        return str(LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=BLANKS))
    if form.kind == "regex":
        return str(LLMatcher.grammar_from_regex(form.value))
    if form.kind == "grammar":
        return str(LLMatcher.grammar_from_lark(form.value))
    if form.kind == "choice":
        choices = " | ".join(json.dumps(choice) for choice in json.loads(form.value))
        return str(LLMatcher.grammar_from_lark(f"start: {choices}"))
    try:
        return str(LLMatcher.grammar_from_json_schema(form.value, overrides=BLANKS))
    except ValueError as error:
        raise BadRequest(f"The schema is no JSON: {error}", code="invalid_schema") from error
