"""Report assignments to other objects' attributes, and figures of the package's structure.

    bin/_ownership.py [CHECKOUT]

State has one owner: an attribute may be set through `self`, or in the function that created the
object. Any other assignment to an attribute is an outside assignment. Exceptions are records (a
class of the same module, an object per thread, or a class in RECORDS) and the attributes in
FOREIGN. A callback, which is a method or a Callable field, may never be replaced from outside. The
class of an object is taken from an annotation in the function, else from the variable names in
RECORDS, else from the attribute, if only records have it.

Exits with 1 if a figure is above its limit in LIMITS; the limits may only be lowered.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = "mlxcache"
LAYERS = [f"{PACKAGE}.{room}" for room in ("engine", "residency", "scheduling")]

LIMITS = {
    "outside assignments": 0,
    "modules with a single importer": 51,
    "docstrings, % of lines": 14,
}
"""Maximum number of outside assignments, besides the exceptions below."""

FOREIGN = {
    "cli.help": {
        "one._runtime_param": "typer has no argument for it",
        "param._runtime_param": "as the line above",
    },
    "cli.serve": {"resource.setrlimit": "mlx-lm calls it when it is imported"},
    "cli.server": {
        "self.config.timeout_graceful_shutdown": "uvicorn's, set when a second signal comes"
    },
    "config.memory": {"relieve.restype": "ctypes has no argument for it"},
    "model.chat_template": {
        "chat_template_utils.ImmutableSandboxedEnvironment": "transformers has no argument for it"
    },
    "bench.lone_model": {"tokenizer.eos_token_ids": "mlx-lm's, which ignores an empty argument"},
    "model.recurrence": {"module.gated_delta_update": "mlx-lm's models have no argument for it"},
    "model.vlm": {"AutoProcessor.from_pretrained": "mlx-vlm replaces it when it is imported"},
    "prompt.codec": {
        "base.normalizer": "a copy of a tokenizers.Tokenizer",
        "base.pre_tokenizer": "as the line above",
    },
    "store.cache_folder": {"library.setxattr.argtypes": "ctypes has no argument for it"},
    "sessions.files": {"self._release.atexit": "weakref.finalize has no argument"},
}
"""Attributes of other libraries' objects that can only be set by assignment, with the reason."""


@dataclass(frozen=True)
class Record:
    """A class whose attributes the functions of some packages may set.

    `packages` are the names of those packages, `names` the variables that hold its objects there.
    """

    packages: frozenset[str]
    names: frozenset[str]
    reason: str


RECORDS = {
    "Node": Record(
        frozenset({"tree"}),
        frozenset({"node", "child", "leaf", "each", "upper", "last"}),
        "an edge of the tree: the tree's functions link, cut and count it",
    ),
    "Usage": Record(
        frozenset({"tree"}), frozenset({"usage"}), "the part of a node that counts its uses"
    ),
    "RequestRecord": Record(
        frozenset({"engine", "explain", "scheduling"}),
        frozenset({"record"}),
        "what a request did: each stage notes its part",
    ),
    "Draft": Record(
        frozenset({"prompt"}),
        frozenset({"draft"}),
        "a request being canonicalised: each rule rewrites its part",
    ),
    "Findings": Record(
        frozenset({"bench"}),
        frozenset({"found"}),
        "what a scenario of prove found: its runner notes the end",
    ),
    "Context": Record(
        frozenset({"cli"}), frozenset({"ctx"}), "typer's: its `obj` is what subcommands share"
    ),
    "Slot": Record(
        frozenset({"model"}),
        frozenset({"slot", "twin"}),
        "a cache object of mlx-lm, which has no such methods",
    ),
}
"""Classes that are records in other modules of their package too, by name."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


# -- outside assignments ---------------------------------------------------------------------


@dataclass
class Fields:
    """Attributes of one class, divided into callbacks and values."""

    module: str
    callbacks: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)


def classes(trees: dict[str, ast.Module]) -> dict[str, list[Fields]]:
    """Return the attributes of all classes by class name. Several classes may have one name."""
    found: dict[str, list[Fields]] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(_fields(module, node))
    return found


def _fields(module: str, node: ast.ClassDef) -> Fields:
    found = Fields(module)
    for one in node.body:
        if isinstance(one, Function):
            found.callbacks.add(one.name)
            _own_fields(one, found)
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            callback = "Callable" in ast.unparse(one.annotation)
            (found.callbacks if callback else found.values).add(one.target.id)
    return found


def _own_fields(method: Function, found: Fields) -> None:
    """Add the attributes that a method sets through `self` to `found`."""
    given = {one.arg: one.annotation for one in (*method.args.args, *method.args.kwonlyargs)}
    for node in ast.walk(method):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            kind = node.annotation if isinstance(node, ast.AnnAssign) else None
            if kind is None and isinstance(node.value, ast.Name):
                kind = given.get(node.value.id)
            callback = kind is not None and "Callable" in ast.unparse(kind)
            for target in _targets(node):
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                    (found.callbacks if callback else found.values).add(target.attr)


@dataclass
class Scope:
    """Variables of one function: those with objects created in it, and the classes of others."""

    made: set[str] = field(default_factory=set)
    classes: dict[str, str] = field(default_factory=dict)


class Outside(ast.NodeVisitor):
    """Visitor that collects the outside assignments of one module as (line, target)."""

    def __init__(self, module: str, known: dict[str, list[Fields]]) -> None:
        self.found: list[tuple[int, str]] = []
        self._module = module
        self._known = known
        self._scopes = [Scope()]

    def visit_Module(self, node: ast.Module) -> None:
        for one in ast.walk(node):
            if isinstance(one, ast.Assign) and _called(one.value) in ("threading.local", "local"):
                self._scopes[0].made |= {ast.unparse(target) for target in one.targets}
        for one in node.body:
            if isinstance(one, Function | ast.ClassDef):
                self._scopes[0].made.add(one.name)
        self.generic_visit(node)

    def _function(self, node: Function) -> None:
        scope = Scope()
        for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            if one.annotation is not None:
                scope.classes[one.arg] = _class_name(one.annotation)
        for inner in ast.walk(node):
            if isinstance(inner, Function | ast.ClassDef) and inner is not node:
                scope.made.add(inner.name)
            elif isinstance(inner, ast.withitem) and inner.optional_vars is not None:
                if _makes(inner.context_expr):
                    scope.made.add(ast.unparse(inner.optional_vars))
            elif isinstance(inner, ast.Assign | ast.AnnAssign) and inner.value is not None:
                if _makes(inner.value):
                    scope.made |= {ast.unparse(target) for target in _targets(inner)}
                if isinstance(inner, ast.AnnAssign):
                    scope.classes[ast.unparse(inner.target)] = _class_name(inner.annotation)
        self._scopes.append(scope)
        self.generic_visit(node)
        self._scopes.pop()

    visit_FunctionDef = _function
    visit_AsyncFunctionDef = _function

    def _assignment(self, node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete) -> None:
        for target in _targets(node):
            foreign = FOREIGN.get(self._module.removeprefix(f"{PACKAGE}."), {})
            if not isinstance(target, ast.Attribute) or ast.unparse(target) in foreign:
                continue
            if not self._may(target.value, target.attr):
                self.found.append((target.lineno, ast.unparse(target)))
        self.generic_visit(node)

    visit_Assign = _assignment
    visit_AugAssign = _assignment
    visit_AnnAssign = _assignment
    visit_Delete = _assignment

    def visit_Call(self, node: ast.Call) -> None:
        if _called(node) in ("setattr", "delattr") and not self._may(node.args[0], ""):
            self.found.append((node.lineno, ast.unparse(node)))
        self.generic_visit(node)

    def _may(self, base: ast.expr, attribute: str) -> bool:
        """Return whether the attribute of the object `base` may be set here."""
        name = ast.unparse(base)
        if name in ("self", "cls") or any(name in scope.made for scope in self._scopes):
            return True
        kind = next((s.classes[name] for s in reversed(self._scopes) if name in s.classes), None)
        if kind not in self._known:
            kind = self._usual(name.rpartition(".")[2]) or kind
        if kind is not None and (kind in self._known or kind in RECORDS):
            return self._is_record(kind, attribute)
        owners = [
            kind
            for kind, several in self._known.items()
            if any(attribute in one.values | one.callbacks for one in several)
        ]
        return bool(owners) and all(self._is_record(kind, attribute) for kind in owners)

    def _usual(self, name: str) -> str | None:
        """Return the record that a variable of this name holds in this package, or None."""
        kinds = (kind for kind, record in RECORDS.items() if name in record.names)
        return next((kind for kind in kinds if self._inside(RECORDS[kind].packages)), None)

    def _inside(self, packages: frozenset[str]) -> bool:
        return any(self._module.startswith(f"{PACKAGE}.{one}.") for one in packages)

    def _is_record(self, kind: str, attribute: str) -> bool:
        several = self._known.get(kind, ())
        if any(attribute in one.callbacks for one in several):
            return False
        listed = kind in RECORDS and self._inside(RECORDS[kind].packages)
        return listed or (bool(several) and all(one.module == self._module for one in several))


def _targets(node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete) -> Iterator[ast.expr]:
    """Yield the single targets of an assignment; tuples and lists are taken apart."""
    waiting = list(node.targets) if isinstance(node, ast.Assign | ast.Delete) else [node.target]
    while waiting:
        target = waiting.pop()
        if isinstance(target, ast.Tuple | ast.List):
            waiting += target.elts
        else:
            yield target.value if isinstance(target, ast.Starred) else target


def _makes(value: ast.expr) -> bool:
    """Return whether an expression creates an object: a call of a class, of `cls`, or a copy."""
    last = _called(value).rpartition(".")[2]
    return last.lstrip("_")[:1].isupper() or last in ("cls", "__new__", "copy", "replace")


def _called(value: ast.expr | None) -> str:
    """Return the name of the function that an expression calls; empty if it is not a call."""
    return ast.unparse(value.func) if isinstance(value, ast.Call) else ""


def _class_name(annotation: ast.expr) -> str:
    """Return the name of an annotation's class: `Task` for `Task | None` and for `model.Task`."""
    if isinstance(annotation, ast.BinOp):
        return _class_name(annotation.left)
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    return ast.unparse(annotation).partition("[")[0].rpartition(".")[2]


# -- the shape of the package ----------------------------------------------------------------


class Imports:
    """Imports between the modules of the package."""

    def __init__(self, trees: dict[str, ast.Module]):
        self._names = trees.keys()
        self.of = {name: set(self._imported(name, tree)) for name, tree in trees.items()}

    def _imported(self, name: str, tree: ast.Module) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                wanted = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                wanted = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for one in wanted:
                module = one if one in self._names else one.rpartition(".")[0]
                if module in self._names and module != name:
                    yield module

    def within(self, layer: str) -> dict[str, set[str]]:
        """Return the imports inside the package `layer`, without its `__init__`."""
        inside = {name for name in self.of if name.startswith(f"{layer}.")}
        return {name: self.of[name] & inside for name in inside}

    def single(self) -> list[str]:
        """Return the modules that only one other module imports.

        Such a module may belong in the module that imports it.
        """
        packages = {name.rpartition(".")[0] for name in self.of}
        importers = {name: [n for n, of in self.of.items() if name in of] for name in self.of}
        return [n for n, by in importers.items() if len(by) == 1 and n not in packages]


def floors(arrows: dict[str, set[str]]) -> int:
    """Return the number of modules on the longest chain of imports. Cycles end a chain."""
    known: dict[str, int] = {}

    def height(name: str, above: tuple[str, ...]) -> int:
        if name not in known:
            below = [height(n, (*above, name)) for n in arrows[name] if n not in above]
            known[name] = 1 + max(below, default=0)
        return known[name]

    return max((height(name, (name,)) for name in sorted(arrows)), default=0)


def optional_fields(tree: ast.Module, name: str) -> int:
    """Return how many attributes the class `name` sets to None in `__init__`, to be set later."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return sum(
                isinstance(one, ast.AnnAssign)
                and isinstance(one.value, ast.Constant)
                and one.value.value is None
                for method in node.body
                if isinstance(method, Function) and method.name == "__init__"
                for one in ast.walk(method)
            )
    return 0


def docstring_lines(tree: ast.Module) -> int:
    """Return the lines of all strings that stand by themselves, of constants too."""
    return sum(
        (one.end_lineno or one.lineno) - one.lineno + 1
        for one in ast.walk(tree)
        if isinstance(one, ast.Expr)
        and isinstance(one.value, ast.Constant)
        and isinstance(one.value.value, str)
    )


def main(checkout: Path) -> int:
    """Print the outside assignments and the figures; return the exit status.

    It is 1 if a figure is above its limit.
    """
    paths = sorted((checkout / PACKAGE).rglob("*.py"))
    sources = {path: path.read_text(encoding="utf-8") for path in paths}
    trees = {_module(path.relative_to(checkout)): ast.parse(sources[path]) for path in paths}
    outside, known = [], classes(trees)
    for path, (module, tree) in zip(paths, trees.items(), strict=True):
        visitor = Outside(module, known)
        visitor.visit(tree)
        outside += [f"{path.relative_to(checkout)}:{line}: {what}" for line, what in visitor.found]
    imports = Imports(trees)
    lines = sum(source.count("\n") for source in sources.values())
    figures: dict[str, int] = {
        "modules": len(paths),
        "lines": lines,
        "modules with a single importer": len(imports.single()),
        "Optional fields of Engine": optional_fields(trees[f"{PACKAGE}.engine.engine"], "Engine"),
        "outside assignments": len(outside),
        "docstrings, % of lines": 100 * sum(map(docstring_lines, trees.values())) // lines,
    }
    for name in LAYERS:
        layer = imports.within(name)
        figures[f"modules in {name}"] = len(layer)
        figures[f"imports inside {name}"] = sum(map(len, layer.values()))
        figures[f"floors of {name}"] = floors(layer)
    print("\n".join(outside))
    print("\n".join(f"{name:32} {count}" for name, count in figures.items()))
    above = [name for name, limit in LIMITS.items() if figures[name] > limit]
    for name in above:
        print(f"{name}: {figures[name]} is above the limit of {LIMITS[name]}", file=sys.stderr)
    return int(bool(above))


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])))
