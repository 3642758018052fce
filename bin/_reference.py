"""Writes docs/reference/: the command line and the HTTP API, as the code has them.

    bin/_reference.py [FOLDER]

Commands come from the typer app, endpoints from the routes with their handlers' docstrings, and
bodies from the types that handlers decode.
"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer
from msgspec import inspect as types

from mlxcache.api.app import create_app
from mlxcache.bench.command import bench
from mlxcache.cli.main import app
from mlxcache.wire import anthropic_types
from mlxcache.wire.openai_types import UnsupportedFields

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NOTICE = "<!-- made by `bin/reference`: change the code, and run it again -->\n"


# -- the command line ------------------------------------------------------------------------


def command_line() -> str:
    """The page of all commands."""
    lines = [
        "# Command line",
        "",
        NOTICE,
        "From a clone, `mlxcache` is `bin/mlxcache`. Flags of `serve` are variables and keys",
        "of `config.toml`: [configuration](../configuration.md). Exit status: 0 done, 1 failed,",
        "2 wrong usage.",
        "",
    ]
    root: Any = typer.main.get_command(app)
    for path, command in _commands("mlxcache", root):
        lines += _command(path, command)
    return "\n".join(lines).rstrip() + "\n"


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    if path == "mlxcache bench":  # the outer one takes all flags as they are
        inner = typer.Typer(add_completion=False)
        inner.command()(bench)
        command = typer.main.get_command(inner)
    yield path, command
    for name, below in sorted(getattr(command, "commands", {}).items()):
        if not below.hidden:
            yield from _commands(f"{path} {name}", below)


def _command(path: str, command: Any) -> list[str]:
    shown = [p for p in command.params if not getattr(p, "hidden", False)]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    options = [p for p in shown if p.param_type_name == "option" and "--help" not in p.opts]
    below = " COMMAND" if getattr(command, "commands", {}) else ""
    usage = " ".join([path, *(["[OPTIONS]"] if options else []), *map(_metavar, arguments)])
    lines = [f"## {path}", "", f"`{usage}{below}`", "", *_text(command.help or ""), ""]
    rows = [(_codes(_metavar(p)), p.help or "") for p in arguments]
    rows += [(_flags(p), _help(p)) for p in options]
    if rows:
        lines += ["| argument | what |", "|---|---|"]
        lines += [*(f"| {_cell(a)} | {_cell(b)} |" for a, b in rows), ""]
    return lines


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _flags(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    numbers = isinstance(option.default, int | float) or getattr(option, "min", None) is not None
    value = option.metavar or ("N" if numbers else option.name.upper())
    return names if option.is_flag else f"{names} {_codes(value)}"


def _codes(value: str) -> str:
    """`A|B` as code; a bar inside of code would end a table's cell."""
    return " or ".join(f"`{part}`" for part in value.split("|"))


def _help(option: Any) -> str:
    text = str(option.help or "")
    plain = isinstance(option.default, int | float | str) and not isinstance(option.default, bool)
    if plain and option.default != "" and "Default" not in text:
        text += f" Default: {option.default}."
    return text


# -- the HTTP API ----------------------------------------------------------------------------


def http_api() -> str:
    """The page of all endpoints."""
    lines = [
        "# HTTP reference",
        "",
        NOTICE,
        "Every endpoint, with what its body and query may hold. What answers mean, and examples:",
        "[HTTP API](../http-api.md). A field without *required* may be left out or be null. Fields",
        "that are not named are ignored, unless it says otherwise.",
        "",
    ]
    unused: Any = object()
    for route in create_app(unused).routes:
        lines += _endpoint(route)
    lines += _blocks()
    return "\n".join(lines).rstrip() + "\n"


def _endpoint(route: Any) -> list[str]:
    methods = sorted(getattr(route, "methods", None) or {"GET"} - {"HEAD"})
    method = next(name for name in methods if name != "HEAD")
    handler = _handler(getattr(route, "endpoint", route))
    if not handler.__doc__:
        raise ValueError(f"the handler of {route.path} has no docstring")
    lines = [f"## {method} {route.path.replace(':path', '')}", "", *_text(handler.__doc__), ""]
    tree = ast.parse(textwrap.dedent(inspect.getsource(handler)))
    query = sorted(_query(tree))
    if query:
        lines += [f"Query: {', '.join(f'`{name}`' for name in query)}.", ""]
    for struct in _bodies(tree, handler):
        lines += _struct(struct, "The body")
        for below in _below(struct, {struct}):
            lines += _struct(below, f"`{below.__name__}`")
    return lines


def _handler(endpoint: Any) -> Callable[..., Any]:
    while hasattr(endpoint, "func"):
        endpoint = endpoint.func
    found: Callable[..., Any] = endpoint
    return found


def _query(tree: ast.AST) -> Iterator[str]:
    """Names that the handler reads from the query."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        at = {"request.query_params.get": 0, "read_number": 1}.get(name)
        if at is not None and isinstance(call.args[at], ast.Constant):
            yield str(call.args[at].value)


def _bodies(tree: ast.AST, handler: Callable[..., Any]) -> Iterator[type[msgspec.Struct]]:
    """The types that the handler decodes."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if ast.unparse(call.func).rpartition(".")[2] not in ("read_json", "decode"):
            continue
        for argument in call.args:
            if isinstance(argument, ast.Name | ast.Attribute):
                name, _, rest = ast.unparse(argument).partition(".")
                value = handler.__globals__.get(name)
                value = getattr(value, rest, None) if rest else value
                if isinstance(value, type) and issubclass(value, msgspec.Struct):
                    yield value


def _struct(struct: type[msgspec.Struct], name: str) -> list[str]:
    info = types.type_info(struct)
    assert isinstance(info, types.StructType)
    refused = (
        set(UnsupportedFields.__struct_fields__) if issubclass(struct, UnsupportedFields) else set()
    )
    rows = [
        f"| `{field.encode_name}` | {_type(field.type)} | {'required' if field.required else ''} |"
        for field in sorted(info.fields, key=lambda field: not field.required)
        if field.name not in refused
    ]
    if not rows:
        return []
    text = " ".join(_text(struct.__doc__ or "")) if "Struct" not in (struct.__doc__ or "") else ""
    closed = " No other fields." if info.forbid_unknown_fields else ""
    opening = text if text.startswith(name) else f"{name}{': ' + text if text else ':'}"
    lines = [f"{opening}{closed}", ""]
    lines += ["| field | type | |", "|---|---|---|", *rows, ""]
    if refused:
        names = ", ".join(f"`{field}`" for field in sorted(refused))
        lines += [f"To use one of these is a 400: {names}.", ""]
    return lines


def _below(struct: type, seen: set[type]) -> list[type[msgspec.Struct]]:
    """The structs inside, each once, in the order in which they are met."""
    info: Any = types.type_info(struct)
    found: list[type[msgspec.Struct]] = []
    for field in info.fields:
        for one in _structs(field.type):
            if one not in seen:
                seen.add(one)
                found += [one, *_below(one, seen)]
    return found


def _structs(type_: Any) -> Iterator[type[msgspec.Struct]]:
    match type_:
        case types.StructType():
            yield type_.cls
        case types.ListType():
            yield from _structs(type_.item_type)
        case types.DictType():
            yield from _structs(type_.value_type)
        case types.UnionType():
            for one in type_.types:
                yield from _structs(one)


def _type(type_: Any) -> str:
    """A type in words."""
    words = {"BoolType": "boolean", "AnyType": "any", "DictType": "object"}
    match type_:
        case types.UnionType():
            kinds = [one for one in type_.types if not isinstance(one, types.NoneType)]
            found = " or ".join(map(_type, kinds))
        case types.ListType():
            found = f"list of {_type(type_.item_type)}{', not empty' if type_.min_length else ''}"
        case types.StructType():
            found = f"`{type_.cls.__name__}`"
        case types.LiteralType():
            found = ", ".join(f"`{value}`" for value in type_.values)
        case types.IntType() | types.FloatType():
            found = ("integer" if isinstance(type_, types.IntType) else "number") + _bounds(type_)
        case types.StrType():
            most = f" of at most {type_.max_length} characters" if type_.max_length else ""
            found = "text" + (most or (", not empty" if type_.min_length else ""))
        case _:
            found = words[type(type_).__name__]
    return found


def _bounds(type_: Any) -> str:
    bounds = [
        f"{sign} {int(value) if value == int(value) else value}"
        for sign, value in ((">", type_.gt), ("≥", type_.ge), ("<", type_.lt), ("≤", type_.le))
        if value is not None
    ]
    return f" {', '.join(bounds)}" if bounds else ""


def _blocks() -> list[str]:
    """The blocks of Anthropic's messages, by their `type`."""
    rows = []
    for name, struct in anthropic_types.BLOCKS.items():
        info: Any = types.type_info(struct)
        fields = (f"`{f.encode_name}`: {_type(f.type)}" for f in info.fields if f.name != "type")
        rows.append(f"| `{name}` | {'; '.join(fields)} |")
    head = ["## Blocks of POST /v1/messages", "", "What `content` may hold, by its `type`."]
    return [*head, "", "| type | fields |", "|---|---|", *rows, ""]


# -- both ------------------------------------------------------------------------------------


def _text(text: str) -> list[str]:
    """A docstring's paragraphs, each in one line; arguments that are not the reader's are left."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text))
    joined = [" ".join(p.split()) for p in paragraphs if p.strip()]
    return "\n\n".join(joined).splitlines()


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


PAGES = {"cli.md": command_line, "http.md": http_api}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")
