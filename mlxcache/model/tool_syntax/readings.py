"""Choice between the readings of one tool block whose values may contain the syntax's own tags.

A tool block is a sequence of values, with *cuts* between them: places where one value may end and
the next may begin.

    <parameter=a> 1 </parameter><parameter=b> 2 </parameter></function>
    head          [  cut: a ends, b begins   ]  [ cut: b ends, and the call ]

The text at a cut may belong to a value instead. A *reading* is a choice of cuts at which values do
end. A cut is taken if the tool has the parameter that begins there, and the call does not have it
yet. There is more than one reading only if the same parameter begins at several places, or if
values contain tags that open parameters. The reading whose calls fit the tools' schemas is used
then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from mlxcache.model.tool_syntax.schema import Parsed, Tool, Tools
from mlxcache.model.tool_syntax.syntax import Call, Malformed

MOST_READINGS = 64
"""Maximum number of readings of one tool block that are compared; one with more is ambiguous."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A place in a tool block where one value may end and the next may begin.

    `end`: the position where the value ends. `start`: the position where the next one begins.
    `name`: the parameter of the next value, or None if the block is complete. `calls`: names of the
    tools whose calls begin between the two values. `hint`: the type that the model wrote for the
    next value, or "".
    """

    end: int
    start: int
    name: str | None
    calls: tuple[str, ...] = ()
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag at position `at` of a tool block; it opens a parameter if `opens`, else closes one."""

    at: int
    opens: bool


Reading = tuple[Cut, ...]
"""The cuts that a reading takes, in order. The last one ends the tool block."""

Convert = Callable[[Tool, Cut, str], Parsed]
"""Function that converts the text of the value that begins at a cut."""


Whole = Callable[[int, int], bool]
"""Function that returns whether the text between two positions can be a value."""


@dataclass(slots=True)
class _Place:
    """Position in a tool block up to which calls and parameters have been read.

    `tool`: the name of the tool that is called. `first`: the call's first parameter, or None.
    `seen`: its parameters so far. `position`: the start of the current value.
    """

    tool: str
    first: str | None
    seen: set[str | None]
    position: int


@dataclass(frozen=True, slots=True)
class _Walk:
    """One reading of a tool block, and why some cuts (places where a value may end) were not used.

    `reading` is None if there is none. `clash`: at an unused cut began a parameter that the call
    already had. `refused`: at an unused cut began a parameter or a call with an unknown name.
    """

    reading: Reading | None
    clash: bool
    refused: bool


class Block:
    """A tool block with its *cuts*: places where one value may end and the next may begin.

    `head`: the first cut, which opens the first call; its `end` is not used. `cuts`: the others, in
    order. `tags`: all tags of parameters. `whole(start, end)` returns whether the text between two
    positions can be a value.
    """

    def __init__(
        self,
        text: str,
        head: Cut,
        cuts: Sequence[Cut],
        tags: Sequence[Tag] = (),
        whole: Whole | None = None,
    ):
        self._text = text
        self._whole = whole
        self._head = head
        self._cuts = cuts
        self._tags = tags

    def read(self, tools: Tools, convert: Convert) -> list[Call]:
        """Read the calls in the tool block.

        A reading is a choice of the cuts at which values end. If there are several, the one whose
        calls fit the tools' schemas is used; if several fit, one in which tags inside values come
        in pairs may be used. If there is only one, its calls are returned even if they do not fit,
        because the client reports this to the model. `convert(tool, cut, text)` converts `text`,
        the value that begins at `cut`, for a call of `tool`. Raises Malformed if there is no
        reading, or if it cannot be decided which of several is meant.
        """
        plain = self._walk(tools)
        if plain.reading is None:
            if not plain.refused:
                raise Malformed("a value has no end")
            plain = self._walk(tools, any_name=True)
            if plain.reading is None:
                raise Malformed("a value has no end")
        found, nested = [plain.reading], None
        if plain.clash:
            found += self._moved(plain.reading)
        if sum(tag.opens for tag in self._tags) > len(plain.reading):
            nested = self._nested(tools)
        if nested is not None and nested not in found:
            found.append(nested)
        wide = self._wide(tools, plain, found)
        return self._choose(found, nested if plain.clash else None, wide, tools, convert)

    def _choose(
        self,
        found: list[Reading],
        preferred: Reading | None,
        wide: Reading | None,
        tools: Tools,
        convert: Convert,
    ) -> list[Call]:
        """Return the calls of one reading, preferably of one that fits the tools' schemas.

        A reading is a choice of the cuts at which values end. `found`: the readings to choose from,
        the likeliest first. `preferred`: the one to choose if several of `found` fit, or None.
        `wide`: the reading in which unknown names begin parameters, or None. It is chosen if it
        fits, or if `found` has only one reading and that one does not fit. `convert`: as in `read`.
        Raises Malformed if none of several readings can be chosen.
        """
        if wide is not None:
            calls, fits = self._calls(wide, tools, convert)
            if fits or (len(found) == 1 and not self._calls(found[0], tools, convert)[1]):
                return calls
        readings = [(reading, *self._calls(reading, tools, convert)) for reading in found]
        valid = [(reading, calls) for reading, calls, fits in readings if fits]
        for reading, calls in valid:
            if len(valid) == 1 or reading == preferred:
                return calls
        if len(found) > 1:
            raise Malformed("the block can be read in two ways")
        return readings[0][1]

    def _calls(self, reading: Reading, tools: Tools, convert: Convert) -> tuple[list[Call], bool]:
        """Return the calls that a reading gives, and whether they all fit the tools' schemas.

        A reading is a choice of the cuts at which values end. `convert(tool, cut, text)` converts
        `text`, the value that begins at `cut`, for a call of `tool`.
        """
        calls: list[Call] = []
        fits = True
        for opening, closing in zip((self._head, *reading), (*reading, None), strict=True):
            calls += [{"name": name, "arguments": {}} for name in opening.calls]
            if closing is None or opening.name is None:
                continue
            tool = tools[calls[-1]["name"]]
            parsed = convert(tool, opening, self._text[opening.start : closing.end])
            calls[-1]["arguments"][opening.name] = parsed.value
            fits = fits and parsed.valid
        return calls, fits and all(tools[c["name"]].valid(c["arguments"]) for c in calls)

    def _walk(self, tools: Tools, *, any_name: bool = False) -> _Walk:
        """Read the tool block from the left, and end each value at the first cut that can end it.

        At such a cut, a parameter begins that the schema has and the call does not have yet, or the
        call ends. With `any_name`, parameters may have names that no schema has.
        """
        taken: list[Cut] = []
        clash = refused = False
        at = _begin(self._head)
        for cut in self._cuts:
            if cut.end < at.position or not self._can_end(at, cut):
                continue
            if cut.name in at.seen and not cut.calls:
                clash |= cut.name != at.first
            elif not any_name and not _known(cut, at.tool, tools):
                refused = True
            else:
                taken.append(cut)
                if cut.name is None:
                    return _Walk(tuple(taken), clash, refused)
                at = _advance(at, cut)
        return _Walk(None, clash, refused)

    def _can_end(self, at: _Place, cut: Cut) -> bool:
        return self._whole is None or self._whole(at.position, cut.end)

    def _nested(self, tools: Tools) -> Reading | None:
        """Return the reading in which every parameter tag opened inside a value is closed there.

        Values that quote a tool call have such tags. A reading is a choice of the cuts at which
        values end. Returns None if there is no such reading.
        """
        cuts = {cut.end: cut for cut in self._cuts}
        taken: list[Cut] = []
        at, depth = _begin(self._head), 0
        for tag in self._tags:
            if tag.at < at.position:
                continue
            if tag.opens:
                depth += 1
            elif depth:
                depth -= 1
            elif cut := cuts.get(tag.at):
                seen = cut.name in at.seen and not cut.calls
                if seen or not _known(cut, at.tool, tools) or not self._can_end(at, cut):
                    continue
                taken.append(cut)
                if cut.name is None:
                    return tuple(taken)
                at = _advance(at, cut)
        return None

    def _wide(self, tools: Tools, plain: _Walk, found: list[Reading]) -> Reading | None:
        """Return the reading in which unknown names begin parameters, or None if it is unlikely.

        A reading says where each value ends. `plain`: the result of the search that accepted known
        names only. `found`: the readings found before, the likeliest first. A model that invents a
        parameter writes matching tags, so the reading is likely only if it leaves no unpaired tag
        inside a value, while the reading `found[0]` does.
        """
        if not plain.refused or self._balanced(found[0]):
            return None
        wide = self._walk(tools, any_name=True).reading
        return wide if wide and wide not in found and self._balanced(wide) else None

    def _balanced(self, reading: Reading) -> bool:
        """Return whether tags that lie inside the values of `reading` come in pairs.

        A reading is a choice of the cuts at which values end. A pair is a tag that opens a
        parameter and a later one in the same value that closes it.
        """
        values = self._values(reading)
        start, end = next(values)
        depth = 0
        for tag in self._tags:
            while tag.at >= end:
                if depth:
                    return False
                following = next(values, None)
                if following is None:
                    return True
                start, end = following
            if tag.at >= start:
                depth += 1 if tag.opens else -1
                if depth < 0:
                    return False
        return depth == 0

    def _values(self, reading: Reading) -> Iterator[tuple[int, int]]:
        """Yield the positions [start, end) of each value in the tool block, by `reading`'s cuts."""
        for opening, closing in zip((self._head, *reading), reading, strict=False):
            yield opening.start, closing.end

    def _moved(self, plain: Reading) -> list[Reading]:
        """Return all other readings with the same parameters as `plain`, but with other cuts.

        A cut is a place where one value ends and the next may begin. Raises Malformed if `plain`
        has several calls, or if there are more than `MOST_READINGS` choices of cuts.
        """
        if any(cut.calls for cut in plain):
            raise Malformed("a parameter of one of several calls begins at several places")
        places: dict[str | None, list[Cut]] = {cut.name: [] for cut in plain}
        for cut in self._cuts:
            if not cut.calls and cut.name in places:
                places[cut.name].append(cut)
        count = 1
        for found in places.values():
            count *= len(found)
            if count > MOST_READINGS:
                raise Malformed("parameters begin at too many places")
        readings = [tuple(sorted(p, key=lambda cut: cut.end)) for p in product(*places.values())]
        return [reading for reading in readings if reading != plain and self._values_whole(reading)]

    def _values_whole(self, reading: Reading) -> bool:
        """Return whether every text between two consecutive cuts of `reading` can be a value."""
        whole = self._whole
        return whole is None or all(whole(start, end) for start, end in self._values(reading))


def _known(cut: Cut, tool: str, tools: Tools) -> bool:
    """Return whether the schema has the parameter that begins at `cut`, in a call of `tool`.

    If further calls begin at `cut`, returns whether their tools exist instead.
    """
    if cut.calls or cut.name is None:
        return all(name in tools for name in cut.calls)
    return tools[tool].open or tools[tool].has(cut.name)


def _begin(cut: Cut) -> _Place:
    return _Place(cut.calls[-1], cut.name, {cut.name}, cut.start)


def _advance(at: _Place, cut: Cut) -> _Place:
    if cut.calls:
        return _begin(cut)
    at.seen.add(cut.name)
    return _Place(at.tool, at.first, at.seen, cut.start)
