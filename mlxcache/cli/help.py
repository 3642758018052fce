"""Commands whose help is plain lines under headings, and which parse text without pydantic.

Typer's own help, in frames, leaves descriptions half of the line, and takes 100 ms to import.
A command may return a `Result`, which is printed, and may raise MlxcacheError, which is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from mlxcache.errors import MlxcacheError

Run = TypeVar("Run", bound=Callable[..., Any])


class Command(TyperCommand):
    def invoke(self, ctx: Any) -> None:
        _run(super().invoke, ctx)

    def get_params(self, ctx: Any) -> list[Any]:
        return _prepared(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)


class Group(TyperGroup):
    def invoke(self, ctx: Any) -> None:
        _run(super().invoke, ctx)

    def get_params(self, ctx: Any) -> list[Any]:
        return _prepared(super().get_params(ctx))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self, ctx, formatter)
        rows = [(name, (one.help or "").split("\n\n")[0]) for name, one in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


class App(typer.Typer):
    def __init__(self, *, cls: type[TyperGroup] = Group, **more: Any):
        # pretty exceptions print local variables, and so keys and prompts
        super().__init__(cls=cls, rich_markup_mode=None, pretty_exceptions_enable=False, **more)

    def command(  # type: ignore[override]
        self, name: str | None = None, *, cls: type[TyperCommand] = Command, **more: Any
    ) -> Callable[[Run], Run]:
        return super().command(name, cls=cls, **more)


def _run(invoke: Callable[[Any], Any], ctx: Any) -> None:
    try:
        if (result := invoke(ctx)) is not None:
            result.print(as_json=ctx.params["as_json"])
    except MlxcacheError:
        from mlxcache.cli.output import reporting  # noqa: PLC0415 - rich takes a while to import

        with reporting():
            raise


def _prepared(parameters: list[Any]) -> list[Any]:
    for one in parameters:
        if getattr(one, "_runtime_param", ...) is None:
            one._runtime_param = _AsTyped()
    return parameters


class _AsTyped:
    """Conversion that keeps what needs none; typer's own imports pydantic, which takes 80 ms."""

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        kind = param.type_descriptor.annotation
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        if several and kind == list[str]:
            return list(value)
        if isinstance(kind, type) and isinstance(value, kind):
            return value
        param._runtime_param = None
        return param.get_runtime_param().coerce(value, param=param, ctx=ctx)


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for one in command.get_params(ctx):
        if (record := one.get_help_record(ctx)) is not None:
            plain, (name, text) = "Options", record
            if one.param_type_name == "argument":
                plain, name = "Arguments", name.partition(" <")[0]
            sections.setdefault(one.rich_help_panel or plain, []).append((name, text))
    for heading, rows in sections.items():
        with formatter.section(heading):
            formatter.write_dl(rows)
