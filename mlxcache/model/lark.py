"""Writer of grammars in llguidance's variant of Lark: rules, terminals, literals, tokens.

Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher

LONGEST_GRAMMAR = 1 << 20

MOST_DIVISORS = 100_000
"""Most of all values of `multipleOf` together: 100,000 compile in 1 s and 15 MB, 1M in 30 s."""

_DIVISOR = re.compile(r'\\*"multipleOf\\*"\s*:\s*([-+.\deE]+)')
_COMBINED = re.compile(r'\\*"(?:allOf|anyOf|oneOf|\$ref)\\*"')

STACK_BYTES = LONGEST_GRAMMAR * 512
"""Bytes of stack that a thread needs to compile any grammar of `LONGEST_GRAMMAR` characters.

llguidance calls itself once for each rule or schema that another one refers to. An overflow of the
stack ends the process. Measured: at most 352 bytes a character, for a chain of rules `a:b`.
"""


class Lark:
    """A grammar under construction, in which equal rules are defined once.

    Markers that are one token of the added vocabulary are written as it, and cannot be in text.
    """

    def __init__(self, tokenizer: Any):
        self.added: dict[str, int] = dict(tokenizer.get_added_vocab())
        self._split = re.compile(
            "(" + "|".join(map(re.escape, sorted(self.added, key=len, reverse=True))) + ")"
        )
        self._rules: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def rule(self, body: str) -> str:
        """Add a rule, a sequence of terminals and tokens; return its name."""
        return self._name("r", body)

    def terminal(self, body: str) -> str:
        """Add a terminal, one regular expression; return its name."""
        return self._name("T", body)

    def lazy(self, body: str) -> str:
        """Add a terminal whose text ends as early as `body` allows; return its name."""
        return self._name("h", body)

    def _name(self, kind: str, body: str) -> str:
        key = kind + body
        if key not in self._names:
            self._names[key] = self.reserve(kind)
            self.define(self._names[key], body)
        return self._names[key]

    def reserve(self, kind: str = "r") -> str:
        """Return a new name to `define` later, for rules that contain themselves."""
        name = f"{kind}{len(self._rules)}"
        self._rules[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        self._rules[name] = body

    def json(self, schema: str) -> str:
        return self.rule(f"%json {schema}")

    def marker(self, text: str) -> str:
        """Return an expression for exactly `text`, with its added tokens as tokens."""
        return " ".join(
            f"<[{self.added[part]}]>" if part in self.added else literal(part)
            for part in self.parts(text)
        )

    def parts(self, text: str) -> list[str]:
        pieces = self._split.split(text) if self.added else [text]
        return [piece for piece in pieces if piece]

    def text(self, start: str) -> str:
        lines = ["%llguidance {}", f"start: {start}"]
        for name, body in self._rules.items():
            lines.append(f"{name}{'[lazy]' if name.startswith('h') else ''}: {body}")
        return "\n".join(lines)


def literal(text: str) -> str:
    # Lark's strings are those of JSON, and DEL has to be escaped in them
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def one_of(options: Iterable[str]) -> str:
    return "(" + " | ".join(options) + ")"


def repeated(item: str, between: str) -> str:
    return f"{item} ({between} {item})*"


def regex(pattern: str) -> str:
    text = re.sub(r"\\(.)|(/)", _escaped, pattern, flags=re.DOTALL)
    for char, name in (("\n", "n"), ("\r", "r"), ("\t", "t")):
        text = text.replace(char, f"\\{name}")
    return f"/(?:{text})/"


def _escaped(found: re.Match[str]) -> str:
    return "\\/" if found[2] or found[1] == "/" else found[0]


def any_text(without: Sequence[str] = ()) -> str:
    if not without:
        return "/(?s:.*)/"
    inner = "|".join(escaped(one) for one in without)
    return f"/(?s:.*)/ & ~/(?s:.*)({inner})(?s:.*)/"


def escaped(text: str) -> str:
    plain = re.sub(r"([^\w\s<>\"'=:,;!@%&`~-])", r"\\\1", text, flags=re.ASCII)
    return plain.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def too_large(grammar: str) -> str | None:
    """Return why compiling a grammar would take too long, or None."""
    if len(grammar) > LONGEST_GRAMMAR:
        return f"it has {len(grammar)} characters, at most {LONGEST_GRAMMAR} are possible"
    divisors = [_numerator(number) for number in _DIVISOR.findall(grammar)]
    size = sum(divisors)
    if size <= MOST_DIVISORS and _COMBINED.search(grammar):  # one number may have to obey several
        size = math.lcm(*divisors)
    if size <= MOST_DIVISORS:
        return None
    return (
        f"its values of multipleOf, without their decimal points, are more than {MOST_DIVISORS} "
        "together (with allOf, anyOf, oneOf or $ref, their least common multiple is)"
    )


def _numerator(number: str) -> int:
    try:
        value = abs(Decimal(number)).normalize()
        return int(value.scaleb(max(0, -value.as_tuple().exponent)))  # type: ignore[operator]
    except ArithmeticError:
        return MOST_DIVISORS + 1


def compile_error(grammar: str) -> str | None:
    """Return the reason why llguidance refuses a grammar, or None if it compiles.

    Call it on a thread with a stack of `STACK_BYTES`.
    """
    if (large := too_large(grammar)) is not None:
        return large
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if not failed:
        return None
    # an excerpt of the grammar, with numbers of lines, ends the message
    reason = re.sub(r"\n *\d+ \| .*", "", str(messages[0]), flags=re.DOTALL)
    return " ".join(reason.split())[:300]
