"""Text printed when the server is ready: its address, model, memory, and how to connect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from mlxcache.cli.connect import anyclaude_line, claude_code_line
from mlxcache.cli.own_command import own_command
from mlxcache.config import format_size
from mlxcache.config.models import Route
from mlxcache.model.demo import DEMO_NOTICE, REAL_MODEL
from mlxcache.types import ModelInfo


def print_welcome(
    console: Console,
    url: str,
    info: ModelInfo,
    figures: Mapping[str, Any],
    *,
    launch: str,
    has_key: bool,
    routes: Sequence[Route] = (),
) -> None:
    """Print the server's address, model, context and budgets, and lines that connect clients.

    `figures` is the body of `GET /v1/cache`, and `launch` the shell line of `mlxcache launch` for
    this server. The lines for clients are not wrapped and stand outside the frame, so that they can
    be copied. `has_key` tells whether the server requires an API key. If the server has several
    models, all of them are listed, with the `routes` that lead to them.
    """
    facts = _facts(url, info, figures, routes)
    if console.is_terminal:
        console.print(Panel.fit(facts, title="mlxcache", padding=(0, 2)), soft_wrap=False)
    else:
        console.print(facts)
    if info.is_demo:
        real = f"For a real one: {own_command()} serve --model {REAL_MODEL}"
        console.print(Text(f"\n{DEMO_NOTICE}\n{real}", "yellow"))
    if has_key:
        console.print("\nThese lines take the key from the variable MLXCACHE_API_KEY.")
    context = info.context_length
    for name, line in (
        ("In another terminal, for a coding agent in your project", f"cd YOUR-PROJECT\n{launch}"),
        ("Claude Code by hand, there", claude_code_line(url, info.id, context, has_key=has_key)),
        ("anyclaude by hand, there", anyclaude_line(url, context, has_key=has_key)),
        ("Others", f"the OpenAI API at {url}/v1, the Anthropic API at {url}"),
        ("Dashboard", f"{url}/dashboard"),
    ):
        console.print(Text.assemble("\n", (name, "bold"), "\n", line))
    console.print()


def _facts(url: str, info: ModelInfo, figures: Mapping[str, Any], routes: Sequence[Route]) -> Text:
    ram, disk = figures["ram"]["limit_bytes"], figures["disk"]
    context = f"{info.context_length:,} tokens"
    if info.context_length < info.max_context_length:
        context += f" (the model has {info.max_context_length:,})"
    several = figures.get("models", ())
    model = info.id + (f", drafted for by {info.draft}" if info.draft else "")
    own = [("Model", model)] if not several else _models(several, routes)
    beside = f"beside the model's {format_size(info.weights_bytes)}"
    lines = (
        ("Address", url),
        *own,
        ("Context", context),
        ("RAM", f"{format_size(ram)}, {'with the weights of all models' if several else beside}"),
        ("Disk", _disk(disk["used_bytes"], disk["limit_bytes"], disk.get("reason"))),
    )
    return Text("\n").join(Text.assemble((f"{name:<9}", "bold"), value) for name, value in lines)


def _models(models: Sequence[Mapping[str, Any]], routes: Sequence[Route]) -> list[tuple[str, str]]:
    """Return a heading and a text for each model; only the first heading is not empty.

    `models` are as in `engine.models.Models.describe`. The text has the model's name, its aliases,
    the patterns of the `routes` that lead to it, and whether it is the default.
    """
    lines: list[tuple[str, str]] = []
    for one in models:
        names = [one["label"], *one["aliases"]]
        known = {name.lower() for name in names}
        names += [route.pattern for route in routes if route.name.lower() in known]
        when = ", and for all other names" if one["default"] else ", loaded at its first request"
        lines.append(("" if lines else "Models", ", ".join(names) + when))
    return lines


def _disk(used: int, limit: int, reason: str | None) -> str:
    """Describe the disk tier in one line. Sizes are in bytes; `limit` is 0 if it is off.

    `reason` says why nothing can be written, or the index not be read; None if both work.
    """
    lost = "computed prefixes are lost when the server ends"
    if reason is not None:
        kept = f"; the {format_size(used)} there are still read" if used else ""
        return f"off, {lost}{kept}. {reason}"
    if not limit:
        return f"off: {lost}"
    return f"{format_size(limit)}, {format_size(used)} of it used"
