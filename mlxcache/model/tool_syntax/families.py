"""The tool calls of model families: one row each, with its reader and its grammar.

Rows are named like mlx-lm's parsers. The forms are those of the families' chat templates and of
their documentation: https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct (qwen3_coder),
https://github.com/MiniMax-AI/MiniMax-M2.5/blob/main/docs/tool_calling_guide.md (minimax_m2),
https://huggingface.co/zai-org/GLM-4.7 (glm47, laguna), and of the others on the same site.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlxcache.errors import Unsupported
from mlxcache.model.tool_syntax import gemma, json_calls, tags
from mlxcache.model.tool_syntax.reading import NO_SYNTAX, ForeignSyntax, Syntax
from mlxcache.model.tool_syntax.writing import ANY_NAME, PARAM, CallGrammar

GENERIC_START, GENERIC_END = "<tool_call>", "</tool_call>"

_NAME = r'"?(?P<name>[^"<>\n]{1,256})"?'
_CALL = r'"?(?P<call>[^"<>\n]{1,256})"?'
_ATTRIBUTES = r"[^<>]{0,200}"


@dataclass(frozen=True, slots=True)
class Family:
    """How a model family writes tool calls. Without a `grammar`, calls cannot be forced.

    `grammar`: that of its calls, or a function that returns that of a tokenizer.
    """

    reader: Syntax
    grammar: CallGrammar | Callable[[Any], CallGrammar] | None = None


def _arg_tags(prefix: str, *, forced: bool = True) -> Family:
    key, value, block = f"{prefix}arg_key", f"{prefix}arg_value", f"{prefix}tool_call"
    reader = tags.NamedCalls(
        call=r"(?P<call>[^\s<>{}\[\]()\"']{1,256})",
        parameter=rf"<{key}>(?P<name>[^<>]{{1,256}})</{key}>(?:\\n|\s)*<{value}>",
        close=f"</{value}>",
        end="",
        blank=r"(?:\\n|\s)*",
        several=False,
    )
    ends = (f"</{value}>", f"</{block}>")
    call = tags.TagGrammar(
        "{}", "", f"<{key}>{{}}</{key}>", f"</{value}>", ends, after_key=f"<{value}>", line=True
    )
    return Family(reader, CallGrammar(f"<{block}>", f"</{block}>", call) if forced else None)


def _tagged(
    block: tuple[str, str],
    call_texts: tuple[str, str],
    value: tuple[str, str],
    opens: str,
    *,
    several: bool = True,
    **reading: Any,
) -> Family:
    """Return the row of a family that writes parameters between tags.

    The texts before and after a tool block, a call and a value; {} is a name. `opens`: the
    beginning of a parameter's tag. `reading`: the other arguments of `TagSyntax`.
    """
    close, end = value[1].strip(), call_texts[1].strip()
    reader = tags.TagSyntax(close=close, end=end, several=several, **reading)
    ends = (close, end, block[1].strip(), opens)
    call = tags.TagGrammar(*call_texts, *value, ends)
    return Family(reader, CallGrammar(*block, call, between="" if several else None))


def _gemma(delimiter: str, opening: str, closing: str, names: str) -> Family:
    call, pattern = partial(gemma.gemma_call, delimiter), re.compile(names)
    grammar = CallGrammar(opening, closing, call, apart="", names=pattern)
    return Family(gemma.GemmaSyntax(delimiter), grammar)


_GENERIC_GRAMMAR = CallGrammar(GENERIC_START, GENERIC_END, json_calls.json_call, names=ANY_NAME)
GENERIC = Family(json_calls.JsonCalls(), _GENERIC_GRAMMAR)
"""Calls that models are told to write if their chat template has no tools."""

HARMONY: Syntax = json_calls.HeadedCalls(
    r"(?:(?!<\|message\|>).){0,400}?\bto=(?:functions\.)?(?P<call>[^\s<]{1,256})"
    r"(?:(?!<\|message\|>).){0,400}?<\|message\|>"
)
"""Reader of gpt-oss's calls: the header of a message, then JSON arguments."""


def _mistral(tokenizer: Any) -> CallGrammar:
    if "[ARGS]" in tokenizer.get_added_vocab() or "[ARGS]" in str(tokenizer.chat_template):
        names = re.compile(r"[\w-]+")
        return CallGrammar("[TOOL_CALLS]", "", json_calls.mistral_call, apart="", names=names)
    return CallGrammar("[TOOL_CALLS][", "]", json_calls.listed_call, between=", ", names=ANY_NAME)


FAMILIES: dict[str, Family] = {
    "function_gemma": _gemma("<escape>", "<start_function_call>", "<end_function_call>", r"\w+"),
    "gemma4": _gemma('<|"|>', "<|tool_call>", "<tool_call|>", r"[\w-]+"),
    "glm47": _arg_tags(""),
    "json_tools": GENERIC,
    "kimi_k2": Family(
        json_calls.HeadedCalls(
            r"(?:<\|tool_call_begin\|>)?\s*"
            r"(?P<call_id>(?:functions\.)?(?P<call>[^\s<>]{1,256}?):\d+)"
            r"\s*<\|tool_call_argument_begin\|>",
            r"<\|tool_call_end\|>|\Z",
        ),
        CallGrammar(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            json_calls.kimi_k2_call,
            between="",
        ),
    ),
    "kimi_k3": Family(
        tags.KimiK3Calls(),
        CallGrammar("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", tags.kimi_k3_call, between=""),
    ),
    "laguna": _arg_tags("", forced=False),
    "longcat": _arg_tags("longcat_"),
    "minicpm5": Family(
        tags.TagSyntax(
            call=r"(?:<function\s+name\s*=\s*+)?[\"']?(?P<call>[^\"'<>\s]{1,256})[\"']?\s{0,9}>",
            parameter=r"<param\s+name\s*=\s*+[\"']?(?P<name>[^\"'<>\n]{1,256})[\"']?\s{0,9}>",
            close="</param>",
            end=r"(?:</function>)?",
            cdata=True,
        ),
        CallGrammar(
            "<function name=",
            "</function>",
            tags.TagGrammar(
                '"{}">',
                "",
                '<param name="{}">',
                "</param>",
                ("</param>", "</function>"),
                cdata=True,
            ),
        ),
    ),
    "minimax_m2": _tagged(
        ("<minimax:tool_call>\n", "</minimax:tool_call>"),
        ('<invoke name="{}">\n', "</invoke>\n"),
        ('<parameter name="{}">', "</parameter>\n"),
        "<parameter name=",
        call=rf"<invoke name={_CALL}>",
        parameter=rf"<parameter name={_NAME}>",
    ),
    "mistral": Family(
        json_calls.HeadedCalls(
            r"(?:\[TOOL_CALLS\])?\s*(?P<call>[^\s\[\]{}]{1,256})\s*(?:\[CALL_ID\]\w{1,64})?\[ARGS\]",
            listed=True,
        ),
        _mistral,
    ),
    "muse_spark": _tagged(
        ("<atem:function_calls>\n", "</atem:function_calls>"),
        ('<atem:invoke name="{}">\n', "</atem:invoke>\n"),
        ('<atem:parameter name="{}">', "</atem:parameter>\n"),
        "<atem:parameter",
        call=rf'<atem:invoke\b{_ATTRIBUTES}?\bname="(?P<call>[^"<>]{{1,256}})"{_ATTRIBUTES}>',
        parameter=(
            rf'<atem:parameter\b{_ATTRIBUTES}?\bname="(?P<name>[^"<>]{{1,256}})"{_ATTRIBUTES}>'
        ),
    ),
    "pythonic": Family(
        json_calls.PythonicCalls(),
        CallGrammar(
            "<|tool_call_start|>[",
            "]<|tool_call_end|>",
            json_calls.pythonic_call,
            between=", ",
            names=re.compile(r"[A-Za-z_][\w.]*"),
        ),
    ),
    "qwen3_coder": _tagged(
        ("<tool_call>\n", "\n</tool_call>"),
        ("<function={}>\n", "</function>"),
        ("<parameter={}>\n", "\n</parameter>\n"),
        "<parameter=",
        call=r"<function=(?P<call>[^<>\n]{1,256})>",
        parameter=r"<parameter=(?P<name>[^<>\n]{1,256})>",
        several=False,
        wrap="\n",
    ),
}


def reader_of(tokenizer: Any, *, generic: bool) -> Syntax:
    """Return the reader of a model's tool calls, NO_SYNTAX if mlx-lm has no parser of them.

    `generic`: the tools are described in the system text, because the template cannot write them.
    """
    if generic:
        return GENERIC.reader
    parse = tokenizer.tool_parser
    if parse is None:
        return NO_SYNTAX
    row = FAMILIES.get(_name_of(parse))
    return row.reader if row else ForeignSyntax(parse)


def grammar_of(tokenizer: Any, *, generic: bool) -> CallGrammar:
    """Return the grammar of a model's tool calls. Raises Unsupported if it is unknown."""
    if generic:
        return _GENERIC_GRAMMAR
    parse = tokenizer.tool_parser
    row = FAMILIES.get(_name_of(parse))
    if row is not None and row.grammar is not None:
        found = row.grammar
        return found if isinstance(found, CallGrammar) else found(tokenizer)
    if parse is None:
        why = ": the syntax of this model's calls is not known"
    else:
        why = f" for the family {parse.__module__.rpartition('.')[2]!r}"
    raise Unsupported(
        f"tool calls cannot be forced{why}; request neither a forced call, a strict tool, nor a "
        "format with tools",
        param=PARAM,
    )


def _name_of(parse: Any) -> str:
    found = re.fullmatch(r"mlx_lm\.tool_parsers\.(\w+)", str(getattr(parse, "__module__", "")))
    return found[1] if found else ""
