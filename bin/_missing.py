"""Exit with status 1 if tests need a package that is not installed: _missing.py PATH[::TEST]...

A PATH is a file or a folder of tests; other arguments are ignored. What they import from tests/,
and the conftest.py of the folders above them, count too. mlx-vlm is used through mlxcache: a test
needs it that names it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path


def needed(files: list[Path]) -> set[str]:
    names = {"mlx_vlm" for file in files if "mlx-vlm" in file.read_text(encoding="utf-8")}
    waiting, seen = [*files], set[Path]()
    while waiting:
        file = waiting.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        waiting += [folder / "conftest.py" for folder in file.parents]
        for first, *rest in (module.split(".") for module in imported(file)):
            if first == "tests":
                module = Path(first, *rest)
                waiting += [module / "__init__.py", module.with_name(f"{module.name}.py")]
            else:
                names.add(first)
    return names


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (node.module, *(f"{node.module}.{one.name}" for one in node.names))


if __name__ == "__main__":
    paths = [Path(one.partition("::")[0]) for one in sys.argv[1:]]
    tests = chain.from_iterable([one] if one.is_file() else one.rglob("*.py") for one in paths)
    sys.exit(not all(map(find_spec, needed([*tests]))))
