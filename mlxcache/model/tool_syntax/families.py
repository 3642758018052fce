"""The tool-call syntaxes of model families, by the names of mlx-lm's parsers.

The forms are those of the families' chat templates and of their documentation:
https://huggingface.co/Qwen/Qwen3-Coder-30B-A3B-Instruct (qwen3_coder),
https://github.com/MiniMax-AI/MiniMax-M2.5/blob/main/docs/tool_calling_guide.md (minimax_m2),
https://huggingface.co/zai-org/GLM-4.7 (glm47, laguna), and of the others on the same site.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mlxcache.model.tool_syntax.gemma import GemmaSyntax
from mlxcache.model.tool_syntax.json_calls import HeadedCalls, JsonCalls
from mlxcache.model.tool_syntax.kimi_k3 import KimiK3Calls
from mlxcache.model.tool_syntax.pythonic import PythonicCalls
from mlxcache.model.tool_syntax.syntax import Syntax
from mlxcache.model.tool_syntax.tags import NamedCalls, TagSyntax

_NAME = r'"?(?P<name>[^"<>\n]{1,256})"?'
_CALL = r'"?(?P<call>[^"<>\n]{1,256})"?'
_ATTRIBUTES = r"[^<>]{0,200}"


def _key_value(prefix: str) -> Syntax:
    return NamedCalls(
        call=r"(?P<call>[^\s<>{}\[\]()\"']{1,256})",
        parameter=(
            rf"<{prefix}arg_key>(?P<name>[^<>]{{1,256}})</{prefix}arg_key>"
            rf"(?:\\n|\s)*<{prefix}arg_value>"
        ),
        close=f"</{prefix}arg_value>",
        blank=r"(?:\\n|\s)*",
    )


GENERIC: Syntax = JsonCalls()
"""Calls that models are told to write if their chat template has no tools."""

HARMONY: Syntax = HeadedCalls(
    r"(?:(?!<\|message\|>).){0,400}?\bto=(?:functions\.)?(?P<call>[^\s<]{1,256})"
    r"(?:(?!<\|message\|>).){0,400}?<\|message\|>"
)
"""Syntax of gpt-oss's calls: the header of a message, then JSON arguments."""

SYNTAXES: dict[str, Syntax] = {
    "function_gemma": GemmaSyntax("<escape>"),
    "gemma4": GemmaSyntax('<|"|>'),
    "glm47": _key_value(""),
    "json_tools": JsonCalls(),
    "kimi_k2": HeadedCalls(
        r"(?:<\|tool_call_begin\|>)?\s*"
        r"(?P<call_id>(?:functions\.)?(?P<call>[^\s<>]{1,256}?):\d+)"
        r"\s*<\|tool_call_argument_begin\|>",
        r"<\|tool_call_end\|>|\Z",
    ),
    "kimi_k3": KimiK3Calls(),
    "laguna": _key_value(""),
    "longcat": _key_value("longcat_"),
    "minicpm5": TagSyntax(
        call=r"(?:<function\s+name\s*=\s*+)?[\"']?(?P<call>[^\"'<>\s]{1,256})[\"']?\s{0,9}>",
        parameter=r"<param\s+name\s*=\s*+[\"']?(?P<name>[^\"'<>\n]{1,256})[\"']?\s{0,9}>",
        close="</param>",
        end=r"(?:</function>)?",
        several=True,
        cdata=True,
    ),
    "minimax_m2": TagSyntax(
        call=rf"<invoke name={_CALL}>",
        parameter=rf"<parameter name={_NAME}>",
        close="</parameter>",
        end="</invoke>",
        several=True,
    ),
    "mistral": HeadedCalls(
        r"(?:\[TOOL_CALLS\])?\s*(?P<call>[^\s\[\]{}]{1,256})\s*(?:\[CALL_ID\]\w{1,64})?\[ARGS\]",
        listed=True,
    ),
    "muse_spark": TagSyntax(
        call=rf'<atem:invoke\b{_ATTRIBUTES}?\bname="(?P<call>[^"<>]{{1,256}})"{_ATTRIBUTES}>',
        parameter=rf'<atem:parameter\b{_ATTRIBUTES}?\bname="(?P<name>[^"<>]{{1,256}})"{_ATTRIBUTES}>',
        close="</atem:parameter>",
        end="</atem:invoke>",
        several=True,
    ),
    "pythonic": PythonicCalls(),
    "qwen3_coder": TagSyntax(
        call=r"<function=(?P<call>[^<>\n]{1,256})>",
        parameter=r"<parameter=(?P<name>[^<>\n]{1,256})>",
        close="</parameter>",
        end="</function>",
        wrap="\n",
    ),
}


def syntax_of(parser: Callable[..., Any]) -> Syntax | None:
    """Return the syntax that a parser of mlx-lm reads, or None for an unknown parser.

    `parser`: the function `parse_tool_call` of a module in `mlx_lm.tool_parsers`.
    """
    found = re.fullmatch(r"mlx_lm\.tool_parsers\.(\w+)", str(getattr(parser, "__module__", "")))
    return SYNTAXES.get(found[1]) if found else None
