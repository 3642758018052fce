"""Sessions of coding agents made from this package's own files: what they read, edit and write."""

from __future__ import annotations

import difflib
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]

Kind = Literal["edit", "write", "diff", "bash", "prose", "mixed"]
Style = Literal["json", "xml"]

_PIECES = re.compile(r"\\.| ?[A-Za-z]+| ?\d{1,3}| ?[^\sA-Za-z\d\\]{1,3}|\n+| +(?= )|\s|\\")
_WORD = 6


@dataclass(frozen=True)
class Message:
    """A message: the reply of the model, or what is sent to it. `result`: it is a tool's result."""

    text: str
    reply: bool = False
    result: bool = False


@dataclass
class Words:
    """A tokenizer like those of models: words with their space, of at most some letters a token."""

    ids: dict[str, int] = field(default_factory=dict)

    def encode(self, text: str) -> list[int]:
        pieces = _PIECES.findall(text)
        short = (p[i : i + _WORD + 1] for p in pieces for i in range(0, len(p), _WORD + 1))
        return [self.ids.setdefault(piece, len(self.ids)) for piece in short]


def numbered(text: str, start: int = 1) -> str:
    """`text` as an agent's tool shows a file."""
    return "\n".join(f"{i:6d}→{line}" for i, line in enumerate(text.split("\n"), start))


def call(style: Style, name: str, arguments: dict[str, str]) -> str:
    """A tool call as a model writes it."""
    if style == "json":
        body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        return f"<tool_call>\n{body}\n</tool_call>"
    inner = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def files(suffix: str, folder: str, least: int, most: int) -> list[tuple[str, str]]:
    """Files of the package or its pages with a number of characters within bounds."""
    found = sorted((ROOT / folder).rglob(f"*{suffix}"))
    texts = ((str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in found)
    return [(name, text) for name, text in texts if least <= len(text) <= most]


def changed(rng: random.Random, lines: Sequence[str], other: Sequence[str], share: float) -> str:
    """Lines with a `share` of them changed: a word, a line more from elsewhere, or one less."""
    out: list[str] = []
    for line in lines:
        kind = rng.choice(("word", "more", "less")) if rng.random() < share else "same"
        if kind == "word":
            words = line.split(" ")
            words[rng.randrange(len(words))] = f"new_{rng.choice('abcdefgh')}{rng.randrange(99)}"
            out.append(" ".join(words))
        elif kind == "more":
            out += [line, rng.choice(other)]
        elif kind == "same":
            out.append(line)
    return "\n".join(out)


def task(rng: random.Random, prose: Sequence[str]) -> Message:
    return Message("Task: " + rng.choice(prose)[:160])


def edit(rng: random.Random, style: Style, name: str, text: str, more: Sequence[str]) -> Message:
    lines = text.split("\n")
    size = rng.randrange(5, 14)
    at = rng.randrange(max(1, len(lines) - size))
    old = lines[at : at + size]
    new = changed(rng, old, more, 0.18)
    arguments = {"file_path": f"/repo/{name}", "old_string": "\n".join(old), "new_string": new}
    return Message(call(style, "Edit", arguments), reply=True)


def read(style: Style, name: str, text: str, words: str) -> Iterator[Message]:
    asks = call(style, "Read", {"file_path": f"/repo/{name}"})
    yield Message(f"{words}\n{asks}", reply=True)
    yield Message(numbered(text), result=True)


def bash(
    rng: random.Random, style: Style, name: str, text: str, prose: Sequence[str]
) -> Iterator[Message]:
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    word = max(re.findall(r"\w+", lines[at]) or ["def"], key=len)
    hits = [f"{name}:{i}:{line}" for i, line in enumerate(lines, 1) if word in line][:12]
    command = f"cd /repo && grep -n '{word}' {name} | head -12"
    yield Message(f"{rng.choice(prose)}\n" + call(style, "bash", {"command": command}), reply=True)
    yield Message("\n".join(hits), result=True)
    test = f"cd /repo && python -m pytest tests/{Path(name).parent.name} -x -q -k {word}"
    yield Message(call(style, "bash", {"command": test}), reply=True)
    yield Message(f"{rng.randrange(1, 40)} passed in {rng.random() * 9:.2f}s", result=True)


def session(kind: Kind, style: Style, seed: int) -> list[Message]:
    rng = random.Random(seed)
    code = files(".py", "mlxcache", 2500, 9000)
    pages = [text for _, text in files(".md", "docs", 3000, 60000)]
    prose = [p.replace("\n", " ") for t in pages for p in t.split("\n\n") if 200 < len(p) < 900]
    elsewhere = [line for _, text in rng.sample(code, 6) for line in text.split("\n") if line]
    out = [Message("You are a coding agent. You have the tools Read, Edit, Write and bash.")]
    fresh = rng.sample(prose, len(prose))
    if kind == "prose":
        for _ in range(8):
            out += [Message("Explain the next point."), Message(fresh.pop(), reply=True)]
        return out
    for name, text in rng.sample(code, 5):
        out.append(task(rng, prose))
        make: dict[str, Callable[[], Iterator[Message]]] = {
            "edit": lambda n=name, t=text: _edits(rng, style, n, t, elsewhere),  # type: ignore[misc]
            "write": lambda n=name, t=text: _write(rng, style, n, t, elsewhere),  # type: ignore[misc]
            "diff": lambda n=name, t=text: _diff(rng, style, n, t, elsewhere),  # type: ignore[misc]
            "bash": lambda n=name, t=text: bash(rng, style, n, t, fresh[:40]),  # type: ignore[misc]
        }
        if kind == "mixed":
            out += _mixed(rng, style, (name, text), elsewhere, fresh)
        else:
            out += make[kind]()
    return out


def _edits(
    rng: random.Random, style: Style, name: str, text: str, more: Sequence[str]
) -> Iterator[Message]:
    yield from read(style, name, text, f"Let me look at {name}.")
    for _ in range(3):
        yield edit(rng, style, name, text, more)
        yield Message(f"The file /repo/{name} has been updated.", result=True)


def _write(
    rng: random.Random, style: Style, name: str, text: str, more: Sequence[str]
) -> Iterator[Message]:
    yield from read(style, name, text, f"Let me look at {name}.")
    whole = changed(rng, text.split("\n"), more, 0.04)
    arguments = {"file_path": f"/repo/{name}", "content": whole}
    yield Message(call(style, "Write", arguments), reply=True)
    yield Message("File written.", result=True)


def _diff(
    rng: random.Random, style: Style, name: str, text: str, more: Sequence[str]
) -> Iterator[Message]:
    yield from read(style, name, text, f"Let me look at {name}.")
    lines = text.split("\n")
    new = changed(rng, lines, more, 0.04).split("\n")
    diff = difflib.unified_diff(lines, new, f"a/{name}", f"b/{name}", lineterm="")
    yield Message("```diff\n" + "\n".join(diff) + "\n```", reply=True)
    yield Message("applied")


def _mixed(
    rng: random.Random,
    style: Style,
    file: tuple[str, str],
    more: Sequence[str],
    prose: list[str],
) -> Iterator[Message]:
    """A run of every kind: thoughts that are new, searches, a file that is read, two edits."""
    name, text = file
    yield from bash(rng, style, name, text, prose[:60])
    yield from read(style, name, text, prose.pop())
    for _ in range(2):
        yield Message(prose.pop(), reply=True)
        yield Message("Go on.")
        yield edit(rng, style, name, text, more)
        yield Message(f"The file /repo/{name} has been updated.", result=True)
    yield Message(prose.pop(), reply=True)
