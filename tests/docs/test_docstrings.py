"""What docstrings say can be checked: the values of constants that they give."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

GIVEN = re.compile(
    r"`(?P<name>[A-Z][A-Z_]+)`\s\((?P<number>[\d.,]+)(?:/(?P<by>\d+))?(?:\s(?P<unit>[KMG]i?B))?"
)
"""A constant with its value: "`MOST` (16)", "`SHARE` (1/64)" or "`LEAST` (5 GB)"."""

UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


def docstrings() -> Iterator[tuple[str, str]]:
    """Each docstring with the name of its module."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted((ROOT / "mlxcache").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield name, text


def test_the_values_of_constants_are_those_of_the_code() -> None:
    """Where a docstring names a constant of its module and adds its value."""
    checked = 0
    for module, text in docstrings():
        for found in GIVEN.finditer(text):
            given = float(found["number"].rstrip(".,").replace(",", "")) / int(found["by"] or 1)
            value = getattr(importlib.import_module(module), found["name"])
            assert given * UNITS.get(found["unit"], 1) == value, (module, found[0])
            checked += 1
    assert checked > 1
