"""Tool calls of every family, with any argument: whole, streamed, and damaged.

`MLXCACHE_TOOL_CASES=10000` runs as many cases for each family (and a tenth of it damaged ones),
and arguments of a megabyte.
"""

from __future__ import annotations

import json
import os
import pkgutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from mlx_lm import tool_parsers

from mlxcache.types import FinishReason, Text, ToolCall
from tests.model.test_output import run
from tests.model.tool_families import CLOSINGS, FAMILIES, PLAIN, Family, Maker, Pieced

CASES = int(os.environ.get("MLXCACHE_TOOL_CASES", "100"))
SIZE = 1_000_000 if CASES >= 10_000 else 50_000


def exact(arguments: str) -> Any:
    return json.loads(arguments, parse_int=str, parse_float=str)


def read(
    family: Family,
    text: str,
    tools: Sequence[Mapping[str, Any]],
    *,
    places: Sequence[int],
    single: bool,
    reason: FinishReason = "stop",
) -> tuple[list[tuple[str, Any]], str]:
    tokenizer = Pieced(family, single=single)
    generic = family.parser is None and family is not FAMILIES["harmony"]
    ids = tokenizer.tokens(tokenizer.cut(text, places))
    pieces, _ = run(tokenizer, ids, reason, tools=tools, generic_tools=generic)
    calls = [(p.name, exact(p.arguments)) for p in pieces if isinstance(p, ToolCall)]
    return calls, "".join(p.text for p in pieces if isinstance(p, Text))


def test_every_parser_of_mlx_lm_has_a_syntax() -> None:
    """A family that a new mlx-lm brings must get its form here."""
    parsers = {family.parser for family in FAMILIES.values() if family.parser is not None}
    assert parsers == {m.name for m in pkgutil.iter_modules(tool_parsers.__path__)}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_any_argument_arrives_as_it_was_written(name: str) -> None:
    """Closing tags of all families are strewn in; whole, in pieces, markers as tokens or not."""
    family = FAMILIES[name]
    for seed in range(CASES):
        maker = Maker(family, seed)
        tools = maker.tools()
        calls = maker.calls(tools, most=3)
        text = family.render(calls)
        expected = [(tool, exact(json.dumps(arguments))) for tool, arguments in calls]
        count = maker.random.choice((0, 3, len(text)))
        places = [maker.random.randrange(len(text)) for _ in range(count)]
        got = read(family, text, tools, places=places, single=bool(seed % 2))
        assert got == (expected, ""), f"seed {seed}: {text!r}"


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_damaged_call_is_text_or_a_call_with_whole_arguments(name: str) -> None:
    """Cut off, or with a part doubled or two characters exchanged.

    The marker that ends the family's blocks is not strewn in: after a cut nothing tells one in an
    argument from the one that ends the call.
    """
    family = FAMILIES[name]
    end = Pieced(family, single=True).tool_call_end or "</tool_call>"
    for seed in range(max(10, CASES // 10)):
        maker = Maker(family, seed, without="<|call|>" if name == "harmony" else end)
        tools = maker.tools()
        calls = maker.calls(tools, most=2)
        text = family.render(calls)
        a, b = sorted(maker.random.sample(range(len(text) + 1), 2))
        damaged = maker.random.choice(
            (text[:b], text[:b] + text[a:], text[:a] + text[a : a + 2][::-1] + text[a + 2 :])
        )
        reason: FinishReason = maker.random.choice(("stop", "length"))
        places = range(len(damaged))
        got, said = read(family, damaged, tools, places=places, single=True, reason=reason)
        header = name == "harmony" and "<|message|>" not in damaged
        assert got or said.strip() or header, f"seed {seed}: {damaged!r}"
        if len(got) > len(calls) and len(damaged) > len(text):
            continue  # the part that is doubled makes a call of its own
        for call in got:
            assert whole(call, calls), f"seed {seed}: {call} of {damaged!r}"


def whole(call: tuple[str, Any], written: Sequence[tuple[str, Any]]) -> bool:
    """Tell if no text in the arguments of a call is a beginning of what was written."""
    tool, arguments = call
    meant = [given for name, given in written if name == tool]

    def cut(name: str, written: Any) -> bool:
        got = arguments.get(name)
        both = isinstance(got, str) and isinstance(written, str)
        return both and got != written and written.startswith(got)

    return not meant or any(not any(cut(*item) for item in w.items()) for w in meant)


WRITE = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
]


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_long_argument_takes_linear_time(name: str) -> None:
    family = FAMILIES[name]
    pieces = (*CLOSINGS, *PLAIN, family.ending, "some more words of a line\n")

    def seconds(size: int) -> float:
        content = Maker(family, 1).text(pieces, most=0)
        maker = Maker(family, size)
        while len(content) < size:
            content += "".join(maker.random.choices(pieces, k=size // 8))
        calls = [("write_file", {"path": "a", "content": content[:size] + "."})]
        text = family.render(calls)
        began = time.perf_counter()
        got, said = read(family, text, WRITE, places=range(0, len(text), 5), single=False)
        assert (got, said) == (calls, "")
        return time.perf_counter() - began

    seconds(1_000)
    short, long = seconds(SIZE // 8), seconds(SIZE)
    assert long < 20 * short + 0.5  # eight times the length; the rest is for a busy machine
