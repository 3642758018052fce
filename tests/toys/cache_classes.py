"""Cache classes in the source of mlx-lm's models, found without importing them.

`python -m tests.toys.cache_classes FOLDER` lists those in an unpacked mlx-lm, one a line.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import mlx_lm.models

INSTALLED = Path(mlx_lm.models.__path__[0])
"""Folder of the modules of the installed mlx-lm."""

_HINT = re.compile(
    r"Cache\(|class \w*Cache|def (make_cache|state|update_and_fetch|is_trimmable|from_state)\b"
)
"""What the source of a module with such a class, or with a `make_cache`, has."""

HELD = {"state", "update_and_fetch", "is_trimmable", "from_state"}
"""Members of which a cache of a layer has at least one."""


def cache_classes(models: Path = INSTALLED) -> set[tuple[str, str]]:
    """Find the cache classes in a folder of model modules, as pairs of module and class.

    These are the classes that look like a cache, by name, base or members, and those that a
    `make_cache` calls, in the module that calls them. Calls of classes in `cache.py` are left out.
    """
    texts = {path.stem: path.read_text("utf-8") for path in models.glob("*.py")}
    trees = {name: ast.parse(text) for name, text in texts.items() if _HINT.search(text)}
    shared = set(_classes(trees["cache"]))
    found = {(module, name) for module, tree in trees.items() for name in _like_caches(tree)}
    for module, tree in trees.items():
        found |= {(module, name) for name in _made(tree) if name not in shared}
    return found


def _classes(tree: ast.Module) -> Iterator[str]:
    return (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _like_caches(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            members = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            bases = {_last(base) for base in node.bases}
            names = {node.name, *bases}
            if "Module" not in bases and (members & HELD or any("Cache" in n for n in names)):
                yield node.name


def _made(tree: ast.Module) -> Iterator[str]:
    """Yield the classes that a `make_cache` calls: names that begin with a capital letter."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "make_cache":
            for part in ast.walk(node):
                name = _last(part.func) if isinstance(part, ast.Call) else ""
                if name.lstrip("_")[:1].isupper() and not name.endswith("Error"):
                    yield name


def _last(node: ast.expr) -> str:
    """Return the last name of a dotted one, or "" of any other expression."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


if __name__ == "__main__":
    for module, name in sorted(cache_classes(Path(sys.argv[1]))):
        print(module, name)
