"""An installation without extras has all that the package imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPTIONAL = {"pil": "pillow"}
"""What an extra brings, by the name under which it is imported."""


def _imported(path: Path) -> set[str]:
    """The first names of what a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=; ]", one, maxsplit=1)[0].lower() for one in requirements}


def test_what_is_imported_is_declared() -> None:
    """What only a test extra brings is missing for everybody else."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = _names(project["dependencies"])
    vision = _names(project["optional-dependencies"]["vision"])
    imported = set().union(*(_imported(path) for path in (ROOT / "mlxcache").rglob("*.py")))
    foreign = imported - set(sys.stdlib_module_names) - {"mlxcache"}
    names = {name.lower().replace("_", "-") for name in foreign}
    assert {"mlx", "mlx-lm", "httpx", "starlette"} <= names
    for name in sorted(names):
        assert name in declared or OPTIONAL.get(name) in vision, f"{name} is not declared"
