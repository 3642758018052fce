"""An installation without extras has all that the package imports."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from mlxcache.model.backend import INSTALL, VLM_VERSION

ROOT = Path(__file__).parents[1]
OPTIONAL = {"pil": "pillow", "transformers": "transformers"}
"""What an extra brings, by the name under which it is imported."""
SEPARATE = {"mlx-vlm"}
"""What is installed by a command of its own, because an extra would bring all that it needs."""


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
    extras = _names(project["optional-dependencies"]["vision"])
    extras |= _names(project["optional-dependencies"]["vlm"])
    imported = set().union(*(_imported(path) for path in (ROOT / "mlxcache").rglob("*.py")))
    foreign = imported - set(sys.stdlib_module_names) - {"mlxcache"}
    names = {name.lower().replace("_", "-") for name in foreign}
    assert {"mlx", "mlx-lm", "httpx", "starlette"} | SEPARATE <= names
    for name in sorted(names - SEPARATE):
        assert name in declared or OPTIONAL.get(name) in extras, f"{name} is not declared"


def test_on_a_mac_mlx_waits_without_the_lock_of_python() -> None:
    """As it does from 0.32.4 on; the pinned version is one of those."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [
        one.specifier
        for one in map(Requirement, project["dependencies"])
        if one.name == "mlx"
        and one.marker is not None
        and one.marker.evaluate({"sys_platform": "darwin"})
    ]
    (pinned,) = re.findall(r"^mlx==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert [[one.contains(it) for it in ("0.32.3", "0.32.4", pinned)] for one in found] == [
        [False, True, True]
    ]


def test_what_an_extra_cannot_express_is_a_command_in_the_docs() -> None:
    """mlx-vlm without its dependencies, in the version that is tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "mlx-vlm" not in _names(project["optional-dependencies"]["vlm"])
    page = (ROOT / "docs" / "install.md").read_text()
    assert f"--no-deps mlx-vlm=={VLM_VERSION}" in page
    assert INSTALL.endswith(f"--no-deps mlx-vlm=={VLM_VERSION}")
    assert f"\nmlx-vlm=={VLM_VERSION}\n" in (ROOT / "constraints.txt").read_text()
