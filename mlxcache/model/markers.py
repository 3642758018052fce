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

from mlxcache.model.tool_syntax.families import (
    GENERIC,
    GENERIC_END,
    GENERIC_START,
    HARMONY,
    reader_of,
)
from mlxcache.model.tool_syntax.reading import NO_SYNTAX, Syntax

NORMAL, REASONING, TOOL = "normal", "reasoning", "tool"
"""Parser states that carry text, named as in mlx-lm. Text in any other is a message header."""

HEADER = "header"
ROUTED = "routed"  # the message header read so far decides the next state

MESSAGE = "<|message|>"
_HARMONY_TOKENS = ("<|start|>", "<|channel|>", MESSAGE, "<|end|>")
_HEADER_BEGINNINGS = ("<|channel|>", "<|start|>", "to=", "assistant")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


@dataclass(frozen=True, slots=True)
class Markers:
    """Markers of a model family, as a state machine over its output.

    The states are NORMAL (visible text), REASONING, TOOL (a tool block) and HEADER (of a message).
    `edges`: for each state, the markers that end it, each with the state that follows it. `tokens`:
    the ids of those markers that are a single token of the vocabulary. `initial`: the state in
    which every reply begins, or None if that depends on the prompt. `opening`: the marker that
    begins a tool block, or "". `open_ended`: a tool block has no closing marker and lasts to the
    end of the reply. `whole`: `syntax` reads a tool block together with its opening text.
    """

    edges: Mapping[str, Mapping[str, str]]
    tokens: Mapping[str, int] = field(default_factory=dict)
    initial: str | None = None
    syntax: Syntax = NO_SYNTAX
    opening: str = ""
    open_ended: bool = False
    harmony: bool = False
    whole: bool = False


PLAIN = Markers(edges={NORMAL: {}, TOOL: {}})


def read_markers(tokenizer: Any, *, tools: bool, generic: bool) -> Markers:
    """Return the markers of the model family of `tokenizer`, mlx-lm's TokenizerWrapper.

    The edges are those of gpt-oss's format, or of another family's in
    `mlx_lm.generate.make_text_state_machine`. `generic`: see `families.reader_of`.
    """
    if is_harmony(tokenizer):
        return _harmony(tokenizer, tools, generic)
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    syntax = reader_of(tokenizer, generic=generic)
    if generic:
        start, end = GENERIC_START, GENERIC_END
    if not tools or syntax is NO_SYNTAX:
        start = end = None
    edges = _edges(tokenizer, start, end, generic)
    return Markers(
        edges=edges,
        tokens=_single_tokens(tokenizer, edges),
        initial=tokenizer.response_initial_state,
        syntax=syntax if start else NO_SYNTAX,
        opening=start or "",
        open_ended=start is not None and not end,
    )


def is_harmony(tokenizer: Any) -> bool:
    """Return whether the model's output must be parsed in gpt-oss's format (harmony).

    True if the vocabulary has harmony's control tokens and mlx-lm itself describes no markers of
    thinking for the model.
    """
    if tokenizer.has_thinking:
        return False
    ids = [tokenizer.convert_tokens_to_ids(token) for token in _HARMONY_TOKENS]
    return None not in ids and tokenizer.unk_token_id not in ids


def thinks(tokenizer: Any) -> bool:
    found = read_markers(tokenizer, tools=False, generic=False)
    return found.harmony or any(REASONING in edges.values() for edges in found.edges.values())


def _harmony(tokenizer: Any, tools: bool, generic: bool) -> Markers:
    edges = {
        HEADER: {MESSAGE: ROUTED},
        NORMAL: {"<|end|>": HEADER, "<|start|>": HEADER},
        REASONING: {"<|end|>": HEADER, "<|start|>": HEADER},
        TOOL: {"<|call|>": HEADER, "<|end|>": HEADER},
    }
    syntax = HARMONY if tools else NO_SYNTAX
    if generic and tools:
        edges[NORMAL][GENERIC_START] = TOOL
        edges[TOOL] = {GENERIC_END: NORMAL}
        syntax = GENERIC.reader
    return Markers(
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


def harmony_route(header: str) -> str:
    """Return the parser's state after a header of gpt-oss: the text before `<|message|>`."""
    if _RECIPIENT.search(header):
        return TOOL
    return REASONING if "<|channel|>analysis" in header else NORMAL


def may_be_header(text: str) -> bool:
    """Return whether a message header of gpt-oss can begin with `text`; True for empty text."""
    text = text.lstrip()
    return any(text.startswith(b) or b.startswith(text) for b in _HEADER_BEGINNINGS)
