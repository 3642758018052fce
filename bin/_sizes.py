"""Fails where a module has 300 lines or more, or a function 40: bin/_sizes.py FOLDER..."""

import ast
import sys
from pathlib import Path

MODULE_LINES = 300
FUNCTION_LINES = 40


def too_long(path: Path) -> list[str]:
    """One line per offence in the module at `path`. A decorator counts, a docstring too."""
    source = path.read_text(encoding="utf-8")
    lines = source.count("\n")
    found = [f"{path}: {lines} lines"] if lines >= MODULE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length >= FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines")
    return found


if __name__ == "__main__":
    modules = [path for folder in sys.argv[1:] for path in sorted(Path(folder).rglob("*.py"))]
    offences = [offence for path in modules for offence in too_long(path)]
    print("\n".join(offences) or f"{len(modules)} modules, all of them short")
    sys.exit(bool(offences))
