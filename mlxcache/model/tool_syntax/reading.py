"""Readers of tool blocks: their interface, scanners, and blocks whose values may contain tags.

A scanner follows one tool block while it arrives, and tells which closing markers may end it. Its
time is linear in the length of the block, independent of the number of markers.

A tool block without escapes is a sequence of values, with *cuts* between them: places where one
value may end and the next may begin.

    <parameter=a> 1 </parameter><parameter=b> 2 </parameter></function>
    head          [  cut: a ends, b begins   ]  [ cut: b ends, and the call ]

The text at a cut may belong to a value instead. A *reading* is a choice of cuts at which values do
end. A cut is taken if the tool has the parameter that begins there, and the call does not have it
yet. There is more than one reading only if the same parameter begins at several places, or if
values contain tags that open parameters. The reading whose calls fit the tools' schemas is used
then.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import product
from typing import Any, Protocol

from mlxcache.model.tool_syntax.arguments import Tool, Tools

Call = dict[str, Any]
"""A call as it was read: `name`, `arguments` (a dict, or JSON text), and `id` if there is one."""


class Malformed(ValueError):
    """Error for a text that is no tool call, or that can be read as two different ones."""


class Closing(Enum):
    """Role that a closing marker would have at the end of the text of a tool block so far."""

    INSIDE = auto()
    """The text ends inside a value, so the marker belongs to that value."""
    MAYBE = auto()
    """The text may be complete, or may end inside a value."""
    FINAL = auto()
    """The text is complete, or is no call; more text does not change that."""
    UNKNOWN = auto()
    """Only reading the whole tool block can tell."""


class Scanner(Protocol):
    def add(self, text: str) -> None: ...

    def closing(self) -> Closing: ...


class Syntax(Protocol):
    def scanner(self) -> Scanner: ...

    def read(self, text: str, tools: Tools) -> list[Call]:
        """Read the calls in a tool block; the schemas of `tools` decide the types of values.

        Raises Malformed if the text is no call, or the errors of parsers of JSON and of mlx-lm.
        """


class JsonScanner:
    """Scanner that tracks whether the text so far ends inside a string between `quotes`."""

    def __init__(self, quotes: str = '"'):
        self._mark = re.compile(rf"\\.|[{quotes}]|\\\Z", re.DOTALL)
        self._quote = ""
        self._escaped = False

    def add(self, text: str) -> None:
        at = int(self._escaped and bool(text))
        if at:
            self._escaped = False
        for found in self._mark.finditer(text, at):
            mark = found[0]
            if mark == "\\":
                self._escaped = True
            elif len(mark) == 1:
                if not self._quote:
                    self._quote = mark
                elif self._quote == mark:
                    self._quote = ""

    def closing(self) -> Closing:
        return Closing.INSIDE if self._quote else Closing.FINAL


class ForeignSyntax:
    """Syntax of which only mlx-lm has a parser. Where it finds calls, a tool block may end."""

    def __init__(self, parse: Callable[[str, list[dict[str, Any]]], Any]):
        self._parse = parse

    def scanner(self) -> Scanner:
        return _Unscanned()

    def read(self, text: str, tools: Tools) -> list[Call]:
        parsed = self._parse(text, tools.definitions)
        return parsed if isinstance(parsed, list) else [parsed]


class _Unscanned:
    def add(self, text: str) -> None:
        pass

    def closing(self) -> Closing:
        return Closing.UNKNOWN


NO_SYNTAX: Syntax = ForeignSyntax(lambda _text, _tools: [])


# -- blocks whose values are not escaped -----------------------------------------------------------

_MOST_READINGS = 64  # of one tool block that are compared; one with more is ambiguous
_MOST_EMPTY = 100  # calls without parameters in a row, as many can begin at each of them
_TAIL = 1_000  # characters at the end of a tool block that are examined at a closing marker


@dataclass(frozen=True, slots=True)
class Cut:
    """A place in a tool block where one value may end and the next may begin.

    `end`: the position where the value ends. `start`: the position where the next one begins.
    `name`: the parameter of the next value, or None if the block is complete. `calls`: names of the
    tools whose calls begin between the two values; all but the last have no parameters. `hint`: the
    type that the model wrote for the next value, or "".
    """

    end: int
    start: int
    name: str | None
    calls: tuple[str, ...] = ()
    hint: str = ""


Tag = tuple[int, bool]
"""Position of a tag, and whether it opens a value."""

Reading = tuple[Cut, ...]
"""The cuts that a reading takes, in order. The last one ends the tool block."""

Convert = Callable[[Tool, Cut, str], tuple[Any, bool]]
"""Conversion of the text of the value that begins at a cut; also tells if it fits its schema."""

Whole = Callable[[int, int], bool]


class _Path:
    def __init__(self, head: Cut):
        self.cuts: list[Cut] = []
        self._enter(head)

    def _enter(self, cut: Cut) -> None:
        if cut.calls:
            self._tool, self.first = cut.calls[-1], cut.name
            self._seen: set[str | None] = set()
        self._seen.add(cut.name)
        self.position = cut.start

    def take(self, cut: Cut) -> None:
        self.cuts.append(cut)
        self._enter(cut)

    def has(self, cut: Cut) -> bool:
        return cut.name in self._seen and not cut.calls

    def knows(self, cut: Cut, tools: Tools) -> bool:
        if cut.calls or cut.name is None:
            return all(name in tools for name in cut.calls)
        return tools[self._tool].has(cut.name)


@dataclass(frozen=True, slots=True)
class Block:
    text: str
    head: Cut
    cuts: Sequence[Cut]
    tags: Sequence[Tag]
    tools: Tools
    whole: Whole
    convert: Convert

    def read(self) -> list[Call]:
        """Read the calls in the tool block.

        If several readings fit the tools' schemas, one in which tags inside values come in pairs
        may be used. If there is only one, its calls are returned even if they do not fit, because
        the client reports this to the model. Raises Malformed if no reading can be chosen.
        """
        plain, clash, refused = self._walk()
        if plain is None and refused:
            plain, clash, refused = self._walk(any_name=True)
        if plain is None:
            raise Malformed("a value has no end")
        found, nested = [plain], None
        if clash:
            found += self._moved(plain)
        if sum(opens for _, opens in self.tags) > len(plain):
            nested = self._nested()
        if nested is not None and nested not in found:
            found.append(nested)
        wide = self._wide(found) if refused else None
        return self._choose(found, nested if clash else None, wide)

    def _choose(
        self, found: list[Reading], preferred: Reading | None, wide: Reading | None
    ) -> list[Call]:
        if wide is not None:
            calls, fits = self._calls(wide)
            if fits or (len(found) == 1 and not self._calls(found[0])[1]):
                return calls
        readings = [(reading, *self._calls(reading)) for reading in found]
        valid = [(reading, calls) for reading, calls, fits in readings if fits]
        for reading, calls in valid:
            if len(valid) == 1 or reading == preferred:
                return calls
        if len(found) > 1:
            raise Malformed("the block can be read in two ways")
        return readings[0][1]

    def _calls(self, reading: Reading) -> tuple[list[Call], bool]:
        calls: list[Call] = []
        fits = True
        for opening, closing in zip((self.head, *reading), (*reading, None), strict=True):
            calls += [{"name": name, "arguments": {}} for name in opening.calls]
            if closing is None or opening.name is None:
                continue
            tool = self.tools[calls[-1]["name"]]
            value, valid = self.convert(tool, opening, self.text[opening.start : closing.end])
            calls[-1]["arguments"][opening.name] = value
            fits = fits and valid
        return calls, fits and all(self.tools[c["name"]].accepts(c["arguments"]) for c in calls)

    def _walk(self, *, any_name: bool = False) -> tuple[Reading | None, bool, bool]:
        """Read the tool block from the left, and end each value at the first cut that can end it.

        There a parameter begins that the schema has (with `any_name`, any) and the call does not
        have yet, or the call ends. Also tells whether a parameter that the call already had, and
        whether an unknown one, began at an unused cut.
        """
        clash = refused = False
        path = _Path(self.head)
        for cut in self.cuts:
            if cut.end < path.position or not self.whole(path.position, cut.end):
                continue
            if path.has(cut):
                clash |= cut.name != path.first
            elif not any_name and not path.knows(cut, self.tools):
                refused = True
            else:
                path.take(cut)
                if cut.name is None:
                    return tuple(path.cuts), clash, refused
        return None, clash, refused

    def _nested(self) -> Reading | None:
        """Return the reading in which every tag opened inside a value is closed there."""
        cuts = {cut.end: cut for cut in self.cuts}
        path, depth = _Path(self.head), 0
        for at, opens in self.tags:
            if at < path.position:
                continue
            if opens:
                depth += 1
            elif depth:
                depth -= 1
            elif cut := cuts.get(at):
                known = path.knows(cut, self.tools) and self.whole(path.position, cut.end)
                if path.has(cut) or not known:
                    continue
                path.take(cut)
                if cut.name is None:
                    return tuple(path.cuts)
        return None

    def _wide(self, found: list[Reading]) -> Reading | None:
        """Return the reading in which unknown names begin parameters, or None if it is unlikely.

        A model that invents a parameter writes matching tags: this reading must leave no unpaired
        tag inside a value, while `found[0]` does.
        """
        if self._balanced(found[0]):
            return None
        wide, _, _ = self._walk(any_name=True)
        return wide if wide and wide not in found and self._balanced(wide) else None

    def _balanced(self, reading: Reading) -> bool:
        values = self._values(reading)
        start, end = next(values)
        depth = 0
        for at, opens in self.tags:
            while at >= end:
                if depth:
                    return False
                following = next(values, None)
                if following is None:
                    return True
                start, end = following
            if at >= start:
                depth += 1 if opens else -1
                if depth < 0:
                    return False
        return depth == 0

    def _values(self, reading: Reading) -> Iterator[tuple[int, int]]:
        for opening, closing in zip((self.head, *reading), reading, strict=False):
            yield opening.start, closing.end

    def _moved(self, plain: Reading) -> list[Reading]:
        """Return all other readings with the same parameters as `plain`, but with other cuts."""
        if any(cut.calls for cut in plain):
            raise Malformed("a parameter of one of several calls begins at several places")
        places: dict[str | None, list[Cut]] = {cut.name: [] for cut in plain}
        for cut in self.cuts:
            if not cut.calls and cut.name in places:
                places[cut.name].append(cut)
        count = 1
        for found in places.values():
            count *= len(found)
            if count > _MOST_READINGS:
                raise Malformed("parameters begin at too many places")
        readings = [tuple(sorted(p, key=lambda cut: cut.end)) for p in product(*places.values())]
        return [
            reading
            for reading in readings
            if reading != plain and all(self.whole(*value) for value in self._values(reading))
        ]


class UnescapedCalls(ABC):
    """Reader of a syntax whose values are not escaped, given as regular expressions.

    They match in bounded time. `call` opens a call, with the group `call` for its name.
    `parameter` opens a parameter, with the group `name`, and the group `hint` if the model writes
    the type. `end` closes a call. `blank` may occur between these. `several`: a block may have
    several calls. `unescape` reverts the template's escaping of names. Subclasses tell where a
    block `ends`, its cuts and tags, which texts can be a whole value, and convert values.
    """

    def __init__(
        self,
        *,
        call: str,
        parameter: str,
        end: str,
        blank: str = r"\s*",
        several: bool = True,
        unescape: Callable[[str], str] = str,
    ):
        self._call, self._parameter = re.compile(call), re.compile(parameter)
        self._end, self._blank = re.compile(end), re.compile(blank)
        self._several, self._unescape = several, unescape

    @abstractmethod
    def ends(self, tail: str) -> bool: ...

    @abstractmethod
    def _cuts(self, text: str, start: int) -> tuple[list[Cut], list[Tag]]: ...

    @abstractmethod
    def _whole(self, text: str) -> Whole: ...

    @abstractmethod
    def _convert(self, tool: Tool, cut: Cut, text: str) -> tuple[Any, bool]: ...

    def is_json(self, text: str) -> bool:
        """Return whether a tool block begins like JSON, which some models write instead."""
        return text.lstrip().startswith(("{", "["))

    def scanner(self) -> Scanner:
        return _BlockScanner(self)

    def read(self, text: str, tools: Tools) -> list[Call]:
        head = self._opened(text, 0, 0)
        if head is None:
            raise Malformed("the block does not begin with a call")
        if head.name is None:
            return [{"name": name, "arguments": {}} for name in head.calls]
        cuts, tags = self._cuts(text, head.start)
        whole = self._whole(text)
        return Block(text, head, cuts, tags, tools, whole, self._convert).read()

    def begins(self, text: str) -> bool:
        head = self._opened(text, 0, 0)
        return head is not None and head.name is not None

    def _opened(self, text: str, end: int, at: int) -> Cut | None:
        """Return the cut from the value that ends at `end` to the first value of the calls at `at`.

        It goes over calls without parameters. None if no call begins, or other text follows one.
        """
        calls: list[str] = []
        while len(calls) < _MOST_EMPTY and (found := self._call.match(text, self._skip(text, at))):
            calls.append(self._unescape(found["call"]).strip())
            at = self._skip(text, found.end())
            if parameter := self._parameter.match(text, at):
                return self._cut(end, parameter, calls)
            ended = self._end.match(text, at)
            if ended is None:
                return None
            at = self._skip(text, ended.end())
            if at == len(text):
                return Cut(end, at, None, tuple(calls))
            if not self._several:
                return None
        return None

    def _closed(self, text: str, end: int, at: int) -> Cut | None:
        """Return the cut from the value that ends at `end`, whose call is closed up to `at`."""
        at = self._skip(text, at)
        if at == len(text):
            return Cut(end, at, None)
        return self._opened(text, end, at) if self._several else None

    def _cut(self, end: int, found: re.Match[str], calls: Sequence[str] = ()) -> Cut:
        hint = found["hint"] if "hint" in found.re.groupindex else None
        name = self._unescape(found["name"]).strip()
        return Cut(end, found.end(), name, tuple(calls), hint or "")

    def _skip(self, text: str, at: int) -> int:
        found = self._blank.match(text, at)
        return at if found is None else found.end()


class _BlockScanner:
    """Judges closing markers by the beginning of the block, until that is known, and its end."""

    def __init__(self, reader: UnescapedCalls):
        self._reader = reader
        self._parts: list[str] = []
        self._tail = ""
        self._json: JsonScanner | None = None
        self._begun = False

    def add(self, text: str) -> None:
        self._tail = (self._tail + text)[-_TAIL:]
        if self._json is not None:
            self._json.add(text)
        elif not self._begun:
            self._parts.append(text)

    def closing(self) -> Closing:
        if not self._begun and not self._begin("".join(self._parts)):
            return Closing.FINAL
        if self._json is not None:
            return self._json.closing()
        return Closing.MAYBE if self._reader.ends(self._tail) else Closing.INSIDE

    def _begin(self, text: str) -> bool:
        if self._reader.is_json(text):
            self._json = JsonScanner()
            self._json.add(text)
        elif not self._reader.begins(text):
            return False
        self._begun = True
        self._parts.clear()
        return True
