"""Text printed when the server is ready: its address, model, memory, and how to connect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from mlxcache.cli.connect import anyclaude_line, claude_code_line
from mlxcache.cli.own_command import own_command
from mlxcache.config import format_size
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
) -> None:
    """Print the server's address, model, context and budgets, and lines that connect clients.

    `figures` is the body of `GET /v1/cache`, and `launch` the shell line of `mlxcache launch` for
    this server. The lines for clients are not wrapped and stand outside the frame, so that they can
    be copied. `has_key` tells whether the server requires an API key.
    """
    facts = _facts(url, info, figures)
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


def _facts(url: str, info: ModelInfo, figures: Mapping[str, Any]) -> Text:
    ram, disk = figures["ram"]["limit_bytes"], figures["disk"]
    context = f"{info.context_length:,} tokens"
    if info.context_length < info.max_context_length:
        context += f" (the model has {info.max_context_length:,})"
    lines = (
        ("Address", url),
        ("Model", info.id + (f", drafted for by {info.draft}" if info.draft else "")),
        ("Context", context),
        ("RAM", f"{format_size(ram)}, beside the model's {format_size(info.weights_bytes)}"),
        ("Disk", _disk(disk["used_bytes"], disk["limit_bytes"], disk.get("reason"))),
    )
    return Text("\n").join(Text.assemble((f"{name:<9}", "bold"), value) for name, value in lines)


def _disk(used: int, limit: int, reason: str | None) -> str:
    """Describe the disk tier in one line. Sizes are in bytes; `limit` is 0 if it is off.

    `reason` says why nothing can be written, or is None.
    """
    lost = "computed prefixes are lost when the server ends"
    if reason is not None:
        kept = f"; the {format_size(used)} there are still read" if used else ""
        return f"off, {lost}{kept}. {reason}"
    if not limit:
        return f"off: {lost}"
    return f"{format_size(limit)}, {format_size(used)} of it used"
