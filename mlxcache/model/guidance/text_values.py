"""Grammar terminals for the strings that a schema allows, as a tool call writes them.

They are for syntaxes in which strings have no quotes, such as those with a tag for each parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mlxcache.model.guidance.lark import any_text, compile_error, literal, one_of, regex
from mlxcache.model.guidance.schema_facts import Node, Schema, listed_values


class Unwritable(ValueError):
    """Error for a schema that a tool-call syntax cannot express.

    `keyword`: the keyword that is the reason, or `properties/NAME` for the name of a property.
    """

    def __init__(self, keyword: str):
        super().__init__(f"the keyword `{keyword}` cannot be enforced in this model's call syntax")
        self.keyword = keyword


_MOST_READ = 2000  # nodes of one schema, in which references may branch
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(\.{_OCTET}){{3}}"
_GROUP = "[0-9a-fA-F]{1,4}"
_DAY = (
    "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    "|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"[0-9]{{4}}-{_DAY}"
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_CLOCK})"
_N = "[0-9]{1,6}"
_HOURS = f"({_N}H({_N}M({_N}S)?)?|{_N}M({_N}S)?|{_N}S)"
_DAYS = f"({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D)"
_FORMATS = {
    "date": _DATE,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_DAYS}(T{_HOURS})?|T{_HOURS}|{_N}W)",
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL}){{1,2}}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,2}}",
    "ipv4": _IPV4,
    "ipv6": f"({_GROUP}:){{7}}{_GROUP}|({_GROUP}:){{1,3}}(:{_GROUP}){{1,4}}|::({_GROUP})?",
    "time": _TIME,
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:/?#@!$&'()*+,;=-]+",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""Regular expressions for each `format`. Some valid texts are left out: dates of February 29, for
example.
"""

_AS_JSON = (
    r"~/(?is:\s*([-+0-9.\[{\"'(].*|(true|false|null|none|nil|nan|infinity|yes|no|on|off)\s*))/"
)
"""Grammar expression for text that cannot be read as JSON, where a value may be text or JSON."""


def text_terminal(
    schema: Schema, node: Node, without: Sequence[str], *, mixed: bool = False
) -> str | None:
    """Return the body of a grammar terminal for the strings that `node` allows.

    `schema`: the definitions to which `node` refers. `without`: the texts that no string may
    contain. `mixed`: True if values of other types may be written as JSON in the same place, so
    that strings which could be read as JSON are excluded. Returns None if `node` allows no strings.
    Raises Unwritable if a keyword cannot be expressed.
    """
    parts = _parts(schema, node, without, frozenset(), iter(range(_MOST_READ)))
    if parts is None:
        return None
    parts = [any_text(without), *parts, *([_AS_JSON] if mixed else [])]
    return " & ".join(parts)


def _parts(
    schema: Schema,
    node: Node,
    without: Sequence[str],
    within: frozenset[str],
    left: Iterator[int],
) -> list[str] | None:
    """Return grammar expressions for strings that `node` allows, or None if it allows none.

    A string must satisfy all of them. `without`: texts that it must not contain. `within`:
    references that are being followed. `left`: an iterator with one item for each node that may
    still be visited. Raises Unwritable if a keyword cannot be expressed.
    """
    if next(left, None) is None:
        raise Unwritable("anyOf")
    if "string" not in schema.types(node):
        return None
    if isinstance(node, bool):
        return []
    parts = list(_own_parts(node, without))
    if (ref := node.get("$ref")) is not None:
        if ref in within:
            raise Unwritable("$ref")
        found = _parts(schema, schema.target(ref), without, within | {ref}, left)
        if found is None:
            return None
        parts += found
    for one in node.get("allOf", ()):
        if (found := _parts(schema, one, without, within, left)) is None:
            return None
        parts += found
    if "anyOf" in node:
        options = [_parts(schema, one, without, within, left) for one in node["anyOf"]]
        possible = [option for option in options if option is not None]
        if not possible:
            return None
        if all(possible):
            parts.append(one_of("(" + " & ".join(option) + ")" for option in possible))
    return parts


def _own_parts(node: dict[str, object], without: Sequence[str]) -> Iterator[str]:
    """Yield a grammar expression for each restriction of strings by keywords of `node`.

    The keywords `$ref`, `anyOf` and `allOf` are ignored. A string must satisfy all expressions.
    `without`: texts that the tool-call syntax forbids in a string. Raises Unwritable if a
    keyword cannot be expressed.
    """
    if (listed := listed_values(node)) is not None:
        texts = [text for text in listed if isinstance(text, str)]
        texts = [text for text in texts if not any(part in text for part in without)]
        if not texts:
            raise Unwritable("const" if "const" in node else "enum")
        yield one_of(literal(text) for text in texts)
    least, most = node.get("minLength", 0), node.get("maxLength", "")
    if least or most != "":
        yield f"/(?s:.{{{least},{most}}})/"
    if (pattern := node.get("pattern")) is not None:
        yield searched(str(pattern))
    if (form := node.get("format")) is not None:
        yield regex(_FORMATS[str(form)])


def searched(pattern: str) -> str:
    """Return the body of a grammar terminal for texts in which `pattern` matches anywhere.

    Raises Unwritable if llguidance cannot compile the pattern.
    """
    found = one_of(_anchored(option) for option in _options(pattern))
    if compile_error(f"start: T\nT: {found}") is not None:
        raise Unwritable("pattern")
    return found


def _options(pattern: str) -> list[str]:
    """Split a regular expression at its top-level `|` into alternatives."""
    options, depth, in_class = [""], 0, False
    for part in re.findall(r"\\.|.", pattern, flags=re.DOTALL):
        if part == "|" and not depth and not in_class:
            options.append("")
            continue
        if in_class:
            in_class = part != "]"
        elif part == "[":
            in_class = True
        depth += (part == "(") - (part == ")") if not in_class else 0
        options[-1] += part
    return options


def _anchored(option: str) -> str:
    """Return a regular expression for whole texts in which `option` matches somewhere.

    `option`: one alternative of a pattern.
    """
    before = after = ".*"
    if option.startswith("^"):
        before, option = "", option[1:]
    if re.search(r"(?<!\\)(\\\\)*\$$", option):
        after, option = "", option[:-1]
    # as in JavaScript, \d and \w are ASCII
    for name, chars in (("d", "[0-9]"), ("w", "[0-9A-Za-z_]")):
        option = re.sub(rf"(?<!\\)((?:\\\\)*)\\{name}", rf"\g<1>{chars}", option)
    inner = regex(option)[1:-1] if option else ""
    return f"/(?s:{before}){inner}(?s:{after})/"
