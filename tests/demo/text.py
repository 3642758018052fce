"""Training text of the demo model: short chats made of prose in the Python distribution.

The prose is the language reference behind `help()` and the docstrings of the standard library,
so that training needs nothing but a Python installation.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics

from mlxcache.model.demo import TURN_END, TURN_START

SKIPPED = {"site-packages", "test", "tests", "idle_test", "lib2to3", "turtledemo"}

QUESTIONS = (
    "What is {}?",
    "What does {} do?",
    "Tell me about {}.",
    "Explain {}.",
    "How does {} work?",
    "Why is {} needed?",
    "Fix the bug in {}.",
    "Write a test for {}.",
    "Look at {} and say what you see.",
    "{}",
)
GREETINGS = (
    "Hi", "Hello", "Hello!", "Hey there", "Good morning", "Who are you?", "What are you?",
    "What is your name?", "Which model is this?", "What can you do?", "Help", "test", "Say hello.",
)  # fmt: skip
SELF = (
    "Hello! I am the demo model of mlxcache. I have two million parameters and I only babble.",
    "I am a demo model. I am very small and I only babble in English.",
)
SYSTEMS = (
    "You are a helpful assistant.",
    "You are a coding agent. Use the tools to help the user.",
    "Be concise. Answer the question of the user.",
)

Prose = list[tuple[str, str]]
"""Pairs of a subject (a topic's or a function's name) and one paragraph about it."""


def prose() -> Prose:
    """About 8,000 paragraphs, 1 MB: whole sentences with hardly any code in them."""
    found: dict[str, str] = {}
    for subject, text in (*sorted(topics.topics.items()), *_docstrings()):
        for part in re.split(r"\n\s*\n", text):
            paragraph = " ".join(part.split())
            if _reads_well(paragraph):
                found.setdefault(paragraph, subject)
    return [(subject, paragraph) for paragraph, subject in found.items()]


def _docstrings() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIPPED & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        except SyntaxError:
            continue  # a template or a file for another version
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = path.stem if isinstance(node, ast.Module) else node.name
                if text := ast.get_docstring(node):
                    yield name, text


def _reads_well(paragraph: str) -> bool:
    if not 40 <= len(paragraph) <= 400 or not paragraph[0].isupper() or paragraph[-1] != ".":
        return False
    plain = sum(char.isalpha() or char in " ,.'-" for char in paragraph)
    return plain > 0.93 * len(paragraph) and paragraph.isascii()


class Chats:
    """An endless source of rendered conversations, drawn from `random.Random(seed)`."""

    def __init__(self, paragraphs: Prose, sources: list[str], seed: int):
        self._prose = paragraphs
        self._sources = sources
        self._draw = random.Random(seed)

    def background(self) -> str:
        """Text before a chat: a system turn, with tools, prose or a file's text."""
        kind = self._draw.randrange(4)
        if kind == 0:
            body = self._draw.choice(SYSTEMS)
        elif kind == 1:
            body = "# Tools\n\n<tools>\n" + "\n".join(self._tool() for _ in range(4))
        elif kind == 2:
            body = " ".join(self._paragraph()[1] for _ in range(4))
        else:
            source = self._draw.choice(self._sources)
            start = self._draw.randrange(max(1, len(source) - 2000))
            body = source[start : start + 2000]
        return f"{TURN_START}system\n{body}"

    def exchange(self) -> str:
        """One user turn and its reply, each closed."""
        user, reply = self._talk()
        return f"{TURN_START}user\n{user}{TURN_END}\n{TURN_START}assistant\n{reply}{TURN_END}\n"

    def _talk(self) -> tuple[str, str]:
        if self._draw.random() < 0.1:
            return self._draw.choice(GREETINGS), self._draw.choice(SELF)
        subject, reply = self._paragraph()
        if self._draw.random() < 0.15:
            return self._paragraph()[1], reply
        return self._draw.choice(QUESTIONS).format(subject), reply

    def _paragraph(self) -> tuple[str, str]:
        return self._draw.choice(self._prose)

    def _tool(self) -> str:
        name, text = self._paragraph()
        names = {self._paragraph()[0]: {"type": "string"} for _ in range(2)}
        parameters = {"type": "object", "properties": names}
        function = {"name": name, "description": text, "parameters": parameters}
        return json.dumps({"type": "function", "function": function})
