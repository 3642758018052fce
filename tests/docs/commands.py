"""Commands of `mlxcache` in shell code, and whether its real parser takes them."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from mlxcache.cli.main import app
from mlxcache.cli.options import given_flags
from mlxcache.config import load_settings

_HEREDOC = re.compile(r"<<-?\s*'?(\w+)'?.*?\n.*?^\1$", re.DOTALL | re.MULTILINE)
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
CLONE = "~/mlxcache/"
"""The folder in which pages have the clone."""
_SCRIPTS = {
    "bin/serve": ("serve",),
    "bin/bench": ("bin/bench",),
    "bin/prove": ("prove",),
    "bin/mlxcache": (),
}


class _Source(io.StringIO):
    """Of a comment, what is read is its text alone: the end of its line ends a command."""

    def readline(self, size: int | None = -1) -> str:  # type: ignore[override]
        line = super().readline(-1 if size is None else size)
        if line.endswith("\n"):
            self.seek(self.tell() - 1)
        return line


def words(code: str) -> Iterator[list[str]]:
    """Each simple command of the shell code, as its words; assignments first, if it has any."""
    source = _Source(_HEREDOC.sub("", code).replace("\\\n", " "))
    lexer = shlex.shlex(source, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace, lexer.whitespace_split = " \t", True
    command: list[str] = []
    for word in lexer:
        if word and set(word) <= set("();<>|&\n"):
            if command:
                yield command
            command = []
        else:
            command.append(word)
    if command:
        yield command


def split(command: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The variables that are set in front of a command, and the command."""
    at, variables = 0, {}
    while at < len(command) and (found := _ASSIGNMENT.fullmatch(command[at])):
        variables[found[1]] = found[2]
        at += 1
    return variables, list(command[at:])


def ours(code: str) -> list[tuple[list[str], dict[str, str]]]:
    """Each `mlxcache` in the shell code, by whatever name: its arguments, and its variables."""
    found = []
    for command in words(code):
        variables, rest = split(command)
        name, *arguments = rest or [""]
        name = name.removeprefix(CLONE)
        if name == "mlxcache":
            found.append((arguments, variables))
        elif name in _SCRIPTS:
            found.append(([*_SCRIPTS[name], *arguments], variables))
    return found


def variables(code: str) -> set[str]:
    """The variables that the shell code sets for a command or exports."""
    found: set[str] = set()
    for command in words(code):
        set_, rest = split(command)
        found |= set(set_)
        if rest[:1] == ["export"]:
            found |= {word.partition("=")[0] for word in rest[1:]}
    return found


def check(arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Parse as `mlxcache` would, but for a call of help; of `serve` read the settings too.

    Raises where it would refuse.
    """
    context = _parsed(arguments)
    if arguments[:1] == ["serve"]:
        load_settings(given_flags(context.params), variables, context.params["config"])


def _parsed(arguments: Sequence[str]) -> Any:
    """The innermost context of a parsed command."""
    if arguments[:1] == ["bin/bench"]:
        from tests.proofs.command import bench as proofs

        return _inner(proofs).make_context("bin/bench", _plain(arguments[1:]))
    command: Any = typer.main.get_command(app)
    rest = _plain(arguments)
    context: Any = None
    name = "mlxcache"
    while True:
        context = command.make_context(name, list(rest), parent=context)
        left = [*getattr(context, "_protected_args", []), *context.args]
        if not hasattr(command, "resolve_command") or not left:
            return context
        name, command, rest = command.resolve_command(context, left)


def _plain(arguments: Sequence[str]) -> list[str]:
    """`arguments` without a call of help."""
    return [argument for argument in arguments if argument not in ("--help", "-h")]


def _inner(function: Callable[..., None]) -> Any:
    """A function's command line."""
    inner = typer.Typer(add_completion=False)
    inner.command()(function)
    return typer.main.get_command(inner)


def touch_files(arguments: Sequence[str], folder: Path) -> None:
    """Make the files that arguments name, for the parser asks whether they are there."""
    for argument in arguments:
        if re.fullmatch(r"[\w-]+\.(?:txt|json|safetensors|toml)", argument):
            (folder / argument).touch()
