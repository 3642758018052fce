"""What a run of the server was good for, told when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from mlxcache.cli import show

if TYPE_CHECKING:
    from mlxcache.engine.metrics import Tally


def gained(console: Console, figures: Mapping[str, Any], tally: Tally) -> None:
    """Print requests, waiting times, what was reused and the time that this saved.

    `figures` are what `GET /v1/cache` says, of a run that had requests.
    """
    requests, saved = figures["requests"], figures["saved"]
    tokens = {f"{name}_tokens": count for name, count in figures["tokens"].items()}
    kinds = [
        f"{requests[kind]:,} {kind}" for kind in ("cold", "warm", "restored") if requests[kind]
    ]
    waits = [
        f"{show.duration(times.average)} {kind}"
        for kind, times in tally.first_token.items()
        if times.average is not None
    ]
    lines = [("Requests", f"{requests['total']:,} ({', '.join(kinds)})")]
    if waits:
        lines.append(("First token", f"after {', '.join(waits)}, on average"))
    lines.append(("Reused", show.reuse(tokens)))
    if saved["tokens"]:
        least = "at least " if saved["tokens"] < tokens["cached_tokens"] else ""
        lines.append(("Time saved", f"{least}{show.duration(saved['seconds'])}"))
    console.print(Text("\nThis run", "bold"))
    for name, value in lines:
        console.print(f"{name:<12} {value}")
