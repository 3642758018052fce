"""Conversion of the grammars of custom tools to regular expressions.

In most syntaxes of calls, a tool's text is a JSON string, for which a schema can require a regular
expression. A Lark grammar is therefore accepted if a regular expression can describe its texts: a
rule may refer to itself only at the beginning or the end of an alternative, because such a
reference can be written as a repetition.

Sources: https://platform.openai.com/docs/guides/function-calling#context-free-grammars and
https://lark-parser.readthedocs.io/en/stable/grammar.html.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.wire.decode import unsupported, wrong

MAX_PATTERN = 100_000
"""Maximum characters of a grammar, and of the regular expression made from it."""

_COMMON = {
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[0-9a-fA-F]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[A-Za-z]",
    "WORD": r"[A-Za-z]+",
    "CNAME": r"[A-Za-z_][A-Za-z0-9_]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
}
"""Terminals of Lark's library `common`."""

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\f\r]+|//[^\n]*|\#[^\n]*)
      | (?P<line>\n)
      | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
      | (?P<regex>/(?!/)(?:[^/\\\n]|\\.)*/[imslux]*)
      | (?P<directive>%[a-z]+)
      | (?P<range>\.\.)
      | (?P<arrow>->)
      | (?P<count>~\s*[0-9]+(?:\s*\.\.\s*[0-9]+)?)
      | (?P<name>[!?]?_?[A-Za-z][A-Za-z0-9_]*)
      | (?P<sign>[:|()\[\]?*+.,{}-]|[0-9]+)""",
    re.VERBOSE,
)


def pattern_of_regex(definition: str, where: str) -> str:
    """Return `definition`, anchored so that it matches only a whole text. `where`: its place."""
    _check_length(definition, where)
    try:
        re.compile(definition)
    except (re.error, RecursionError, OverflowError) as error:
        raise wrong(where, f"not a regular expression: {error}.") from error
    return f"^(?:{definition})$"


def pattern_of_lark(definition: str, where: str) -> str:
    """Return a regular expression for the texts that the rule `start` of a Lark grammar matches.

    `where` is the definition's place in the body. Raises Unsupported if a rule refers to itself
    elsewhere than at the beginning or end of an alternative, or through another rule, and for
    templates, `%ignore`, look-around, the flag `x`, and imports other than `_COMMON`.
    """
    _check_length(definition, where)
    try:
        pattern = _Expander(_Parser(definition, where).rules(), where).expand("start")
    except RecursionError as error:
        raise wrong(where, "the grammar is nested too deeply: simplify it.") from error
    return pattern_of_regex(pattern, where)


def _check_length(text: str, where: str) -> None:
    """Raise BadRequest for an expression that would take too long to parse."""
    if len(text) > MAX_PATTERN:
        raise wrong(where, "the grammar is too large: simplify it.")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str


_END = _Token("end", "")


class _Parser:
    """Parser of a Lark grammar, which turns each alternative of a rule into a regular expression.

    In the expression a reference to a rule is the rule's name between two NUL characters. A NUL
    character in the grammar is written as an escape.
    """

    def __init__(self, text: str, where: str):
        self._where = where
        self._tokens = list(self._scan(text))
        self._at = 0

    def _scan(self, text: str) -> Iterator[_Token]:
        at = 0
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None:
                raise self._wrong(f"unexpected {text[at]!r} at character {at}")
            at = match.end()
            if match.lastgroup not in (None, "blank"):
                yield _Token(str(match.lastgroup), match[0])

    def _wrong(self, what: str) -> BadRequest:
        return wrong(self._where, f"not a Lark grammar: {what}.")

    def _unsupported(self, what: str) -> Unsupported:
        return unsupported(
            self._where, f"{what}, which is not supported in the grammar of a custom tool."
        )

    def _peek(self) -> _Token:
        return self._tokens[self._at] if self._at < len(self._tokens) else _END

    def _take(self) -> _Token:
        token = self._peek()
        self._at += 1
        return token

    def _skip(self, text: str) -> bool:
        found = self._peek().text == text
        self._at += found
        return found

    def rules(self) -> dict[str, list[str]]:
        """Parse the whole grammar; return each rule's alternatives by the rule's name."""
        found = dict[str, list[str]]()
        while (token := self._take()) is not _END:
            if token.kind == "line":
                continue
            if token.kind == "directive":
                self._directive(token.text, found)
            elif token.kind == "name":
                name = token.text.lstrip("!?")
                found[name] = self._definition(name)
            else:
                raise self._wrong(f"{token.text[:40]!r} where a rule should begin")
        return found

    def _directive(self, name: str, found: dict[str, list[str]]) -> None:
        line = ""
        while self._peek().kind not in ("line", "end"):
            line += self._take().text
        if name != "%import":
            raise self._unsupported(f"the grammar has {name}")
        if several := re.fullmatch(r"common\((\w+(?:,\w+)*)\)", line):
            imported = {source: source for source in several[1].split(",")}
        else:
            source, _, alias = line.removeprefix("common.").partition("->")
            imported = {alias or source: source}
        for alias, source in imported.items():
            if not line.startswith("common") or source not in _COMMON:
                raise self._unsupported(f"the grammar imports {line[:80]!r}")
            found[alias] = [_COMMON[source]]

    def _definition(self, name: str) -> list[str]:
        if self._skip("."):
            self._skip("-")
            self._take()
        if self._peek().text == "{":
            raise self._unsupported(f"the rule {name!r} is a template")
        if not self._skip(":"):
            raise self._wrong(f"no ':' after the name {name[:40]!r}")
        choices = self._choices(top=True)
        if self._peek().kind not in ("line", "end"):
            raise self._wrong(f"{self._peek().text[:40]!r} in the rule {name[:40]!r}")
        return choices

    def _choices(self, *, top: bool) -> list[str]:
        choices = [self._sequence(top=top)]
        while self._next_alternative(top=top):
            choices.append(self._sequence(top=top))
        return choices

    def _next_alternative(self, *, top: bool) -> bool:
        """Advance past the `|` of a rule's next alternative; return whether there is one.

        `top`: outside of parentheses, where a line end ends the rule unless the next line with text
        begins with `|`.
        """
        begin = self._at
        while self._peek().kind == "line":
            self._at += 1
        if self._skip("|"):
            return True
        if top:
            self._at = begin
        return False

    def _sequence(self, *, top: bool) -> str:
        parts: list[str] = []
        while True:
            token = self._peek()
            if token.kind == "line" and not top:
                self._at += 1
            elif token.kind in ("string", "regex", "name") or token.text in ("(", "["):
                parts.append(self._repeated(self._atom()))
            elif token.kind == "arrow":
                self._at += 2
            else:
                return "".join(parts)

    def _atom(self) -> str:
        token = self._take()
        match token.kind:
            case "string":
                return self._string(token.text)
            case "regex":
                return self._regex(token.text)
            case "name":
                return f"\0{token.text.lstrip('!?')}\0"
        inner = _one_of(self._choices(top=False))
        closing = ")" if token.text == "(" else "]"
        if not self._skip(closing):
            raise self._wrong(f"no {closing!r} before {self._peek().text[:40]!r}")
        return f"(?:{inner})" + ("?" if closing == "]" else "")

    def _string(self, text: str) -> str:
        if self._skip(".."):
            ends = self._value(text), self._value(self._take().text)
            if any(len(end) != 1 for end in ends):
                raise self._wrong(f"a range from {ends[0][:40]!r} is not of single characters")
            return f"[{_escape(ends[0])}-{_escape(ends[1])}]"
        escaped = f"(?:{_escape(self._value(text))})"
        return f"(?i:{escaped})" if text.endswith("i") else escaped

    def _value(self, text: str) -> str:
        try:
            value = ast.literal_eval(_without_nul(text.removesuffix("i")))
        except (SyntaxError, ValueError) as error:
            raise self._wrong(f"{text[:40]!r} is not a string") from error
        if not isinstance(value, str):
            raise self._wrong(f"{text[:40]!r} is not a string")
        return value

    def _regex(self, text: str) -> str:
        body, _, flags = text[1:].rpartition("/")
        body = _without_nul(body.replace("\\/", "/"))
        if re.search(r"\(\?[=!<]", body):
            raise self._unsupported(f"the expression {text[:80]!r} looks around")
        if "x" in flags:
            raise self._unsupported(f"the expression {text[:80]!r} has the flag x")
        flags = "".join(flag for flag in dict.fromkeys(flags) if flag in "is")
        return f"(?{flags}:{body})" if flags else f"(?:{body})"

    def _repeated(self, atom: str) -> str:
        token = self._peek()
        if token.kind == "count":
            self._at += 1
            least, _, most = token.text[1:].replace(" ", "").partition("..")
            return f"(?:{atom}){{{least}{f',{most}' if most else ''}}}"
        if token.text in ("?", "*", "+"):
            self._at += 1
            return f"(?:{atom}){token.text}"
        return atom


def _without_nul(literal: str) -> str:
    """Return a string or an expression of a grammar with escapes in place of NUL characters."""
    return re.sub(r"(\\[^\0])|\\?\0", lambda found: found[1] or "\\x00", literal)


def _escape(text: str) -> str:
    return re.escape(text).replace("\0", "\\x00")


def _one_of(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"(?:{'|'.join(choices)})"


def _repetition(name: str, choices: Sequence[str]) -> str:
    """Return an expression for the rule `name`, with repetitions in place of references to itself.

    `x: b x | x a | x m x | c` becomes `y (m y)*`, where `y` is `b* c a*`. A reference to itself in
    the middle of an alternative is kept. If every alternative begins or ends with such a reference
    that is not optional, all of them are kept.
    """
    itself = f"\0{name}\0"
    optional = f"(?:{itself})?"
    parts: dict[tuple[bool, bool], list[str]] = {}
    for choice in choices:
        begins = choice.startswith(itself), choice.startswith(optional)
        rest = choice.removeprefix(itself if begins[0] else optional)
        ends = rest.endswith(itself), rest.endswith(optional)
        rest = rest.removesuffix(optional if ends[1] else itself)
        for left, right in product(_presences(*begins), _presences(*ends)):
            parts.setdefault((left, right), []).append(rest)
    if (False, False) not in parts:
        return _one_of(choices)
    whole = "".join(
        _one_of(parts[sides]) if sides == (False, False) else f"(?:{_one_of(parts[sides])})*"
        for sides in ((False, True), (False, False), (True, False))
        if sides in parts
    )
    if (True, True) in parts:
        whole += f"(?:{_one_of(parts[True, True])}{whole})*"
    return whole


def _presences(always: bool, sometimes: bool) -> tuple[bool, ...]:
    """Return the cases for one side of an alternative: with a reference, and without."""
    return (True,) if always else (True, False) if sometimes else (False,)


class _Expander:
    """Replacement of the references to rules in expressions by the rules' own expressions."""

    def __init__(self, rules: Mapping[str, Sequence[str]], where: str):
        self._rules = {name: _repetition(name, choices) for name, choices in rules.items()}
        self._where = where
        self._open: list[str] = []
        self._done: dict[str, str] = {}

    def expand(self, name: str) -> str:
        """Return the expression of the rule `name` without references."""
        if name in self._done:
            return self._done[name]
        if name in self._open:
            raise unsupported(
                self._where,
                f"the rule {name[:40]!r} refers to itself, which the grammar of a custom tool may "
                "do only directly, at the beginning or end of an alternative: write out the levels "
                "of nesting that you need.",
            )
        if name not in self._rules:
            raise wrong(self._where, f"the grammar has no rule {name[:40]!r}.")
        self._open.append(name)
        first, *rest = self._rules[name].split("\0")
        found = first
        for i, part in enumerate(rest):
            found += part if i % 2 else f"(?:{self.expand(part)})"
            _check_length(found, self._where)
        self._open.pop()
        self._done[name] = found
        return found
