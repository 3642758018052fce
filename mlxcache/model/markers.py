"""Markers: strings in a model's output that open and close thinking and tool calls.

mlx-lm describes the markers of most model families. The format of gpt-oss, called harmony, is
described here. In harmony a reply consists of several messages, each with a header that names its
channel:

    <|channel|>analysis<|message|>thinking<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>text<|return|>

Its prompt ends with `<|start|>assistant`, so a reply begins within a header. Source:
https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxcache.model.tool_syntax.families import GENERIC, HARMONY, syntax_of
from mlxcache.model.tool_syntax.syntax import Syntax
from mlxcache.model.tools import ForeignSyntax

NORMAL, REASONING, TOOL = "normal", "reasoning", "tool"
"""Parser states that carry text, named as in mlx-lm. Text in any other state is a message header.
"""

ROUTED = "routed"
"""Target of a transition whose next state is decided by the message header read so far."""

GENERIC_START, GENERIC_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class Grammar:
    """Markers of a model family, as a state machine over its output.

    The states are NORMAL (visible text), REASONING, TOOL (a tool block) and HEADER (of a message).
    `edges`: for each state, the markers that end it, each with the state that follows it. `tokens`:
    the ids of those markers that are a single token of the vocabulary. `initial`: the state in
    which every reply begins, or None if that depends on the prompt. `syntax`: the reader of tool
    calls in the text of a tool block, or None if none are recognised. `opening`: the marker that
    begins a tool block, or "". `open_ended`: a tool block has no closing marker, and lasts to the
    end of the reply. `harmony`: the format is that of gpt-oss. `whole`: `syntax` reads the text of
    a tool block together with the text that opened it.
    """

    edges: Mapping[str, Mapping[str, str]]
    tokens: Mapping[str, int] = field(default_factory=dict)
    initial: str | None = None
    syntax: Syntax | None = None
    opening: str = ""
    open_ended: bool = False
    """True if a tool block has no closing marker and lasts to the end of the reply."""
    harmony: bool = False
    """True for the format of gpt-oss."""
    whole: bool = False
    """True if `syntax` reads a tool block together with its opening text."""


PLAIN = Grammar(edges={NORMAL: {}, TOOL: {}})
"""Grammar of replies without markers, in which all output is text."""


def grammar(tokenizer: Any, *, tools: bool, generic: bool) -> Grammar:
    """Return the markers of the model family of `tokenizer`, mlx-lm's TokenizerWrapper.

    The edges of the result are those of gpt-oss's format, or of another family's in
    `mlx_lm.generate.make_text_state_machine`, with markers as strings. With `tools` False, no tool
    calls are recognised. With `generic`, tool blocks are written as
    `<tool_call>{json}</tool_call>` instead of the family's own form.
    """
    if is_harmony(tokenizer):
        return _harmony(tokenizer, tools, generic)
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    parse = tokenizer.tool_parser
    syntax = None if parse is None else syntax_of(parse) or ForeignSyntax(parse)
    if generic:
        start, end, syntax = GENERIC_START, GENERIC_END, GENERIC
    if not tools or syntax is None:
        start = end = None
    edges = _edges(tokenizer, start, end, generic)
    return Grammar(
        edges=edges,
        tokens=_single_tokens(tokenizer, edges),
        initial=tokenizer.response_initial_state,
        syntax=syntax if start else None,
        opening=start or "",
        open_ended=start is not None and not end,
    )


def is_harmony(tokenizer: Any) -> bool:
    """Return whether the model's output must be parsed in gpt-oss's format (harmony).

    True if the vocabulary has harmony's control tokens and mlx-lm itself describes no markers of
    thinking for the model. `tokenizer`: mlx-lm's TokenizerWrapper.
    """
    return not tokenizer.has_thinking and _speaks_harmony(tokenizer)


def thinks(tokenizer: Any) -> bool:
    """Return whether the model's output format has markers or messages for thinking.

    `tokenizer`: mlx-lm's TokenizerWrapper.
    """
    found = grammar(tokenizer, tools=False, generic=False)
    return found.harmony or any(REASONING in edges.values() for edges in found.edges.values())


def _harmony(tokenizer: Any, tools: bool, generic: bool) -> Grammar:
    edges = _harmony_edges(ROUTED)
    syntax = HARMONY if tools else None
    if generic and tools:
        edges[NORMAL][GENERIC_START] = TOOL
        edges[TOOL] = {GENERIC_END: NORMAL}
        syntax = GENERIC
    return Grammar(
        edges=edges,
        tokens=_single_tokens(tokenizer, edges),
        initial=HEADER,
        syntax=syntax,
        opening=GENERIC_START if generic else "",
        harmony=True,
        whole=syntax is HARMONY,
    )


def _edges(
    tokenizer: Any, start: str | None, end: str | None, generic: bool
) -> dict[str, dict[str, str]]:
    edges: dict[str, dict[str, str]] = {NORMAL: {}, TOOL: {}}
    if tokenizer.has_thinking:
        edges[NORMAL][tokenizer.think_start] = REASONING
        edges[REASONING] = {tokenizer.think_end: NORMAL}
    responses = tokenizer.response_transitions
    if start:
        # a response format that leads to "tool" decides where calls begin
        if TOOL not in {target for found in responses.values() for _, target in found}:
            edges[NORMAL][start] = TOOL
        # models rehearse a format that they were not trained on while they think
        if tokenizer.has_thinking and not generic:
            edges[REASONING][start] = TOOL
        if end:
            edges[TOOL][end] = NORMAL
    edges[NORMAL].update(dict.fromkeys(tokenizer.structural_markers, NORMAL))
    for state, found in responses.items():
        edges.setdefault(state, {}).update(found)
    return edges


def _single_tokens(tokenizer: Any, edges: Mapping[str, Mapping[str, str]]) -> dict[str, int]:
    tokens = {}
    for marker in {marker for found in edges.values() for marker in found}:
        ids = tokenizer.encode(marker, add_special_tokens=False)
        if len(ids) == 1:
            tokens[marker] = ids[0]
    return tokens


HEADER = "header"
MESSAGE = "<|message|>"
_HARMONY_TOKENS = ("<|start|>", "<|channel|>", MESSAGE, "<|end|>")
_HEADER_BEGINNINGS = ("<|channel|>", "<|start|>", "to=", "assistant")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


def _speaks_harmony(tokenizer: Any) -> bool:
    """Return whether the vocabulary has the control tokens of gpt-oss's format (harmony).

    `tokenizer`: mlx-lm's TokenizerWrapper.
    """
    ids = [tokenizer.convert_tokens_to_ids(token) for token in _HARMONY_TOKENS]
    return None not in ids and tokenizer.unk_token_id not in ids


def _harmony_edges(to: str) -> dict[str, dict[str, str]]:
    """Return the edges of a `Grammar` for gpt-oss's format.

    `to`: the state after a message header, or ROUTED if `harmony_route` chooses it.
    """
    return {
        HEADER: {MESSAGE: to},
        "normal": {"<|end|>": HEADER, "<|start|>": HEADER},
        "reasoning": {"<|end|>": HEADER, "<|start|>": HEADER},
        "tool": {"<|call|>": HEADER, "<|end|>": HEADER},
    }


def harmony_route(header: str) -> str:
    """Return the state of the parser for the text after a message header of gpt-oss.

    `header`: the text before `<|message|>`, with its control tokens written out. The state is
    "tool" if the header names a recipient (`to=NAME`), "reasoning" if its channel is analysis, and
    "normal" otherwise.
    """
    if _RECIPIENT.search(header):
        return "tool"
    return "reasoning" if "<|channel|>analysis" in header else "normal"


def may_be_header(text: str) -> bool:
    """Return whether a message header of gpt-oss can begin with `text`; True for empty text."""
    text = text.lstrip()
    return any(text.startswith(b) or b.startswith(text) for b in _HEADER_BEGINNINGS)
