"""Menu of `mlxcache launch`, shown if no client is named."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable

from rich.console import Console
from rich.prompt import Prompt
from rich.table import Table
from rich.text import Text

from mlxcache.cli.launch.clients import CLIENTS, Client, ClientName
from mlxcache.cli.launch.setup import Service
from mlxcache.cli.own_command import own_command
from mlxcache.config import format_size, machine_bytes
from mlxcache.errors import ConfigError

MIN_PROMPTS = 2
"""Minimum context for a client, in multiples of its first prompt. A shorter one is reported."""

GB = 10**9
MODELS = (
    (80 * GB, "mlx-community/Qwen3-Next-80B-A3B-Instruct-4bit", 45 * GB),
    (30 * GB, "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit", 17 * GB),
    (0, "mlx-community/Qwen3-4B-Instruct-2507-4bit", 2.3 * GB),
)
"""Models to suggest: minimum memory in bytes, Hub id, bytes of the weights.

All can call tools."""

Which = Callable[[str], str | None]


def choose_client(found: Service | None, model: str | None, context: int | None) -> ClientName:
    """Print the menu and return the client that the user chooses. Blocks for the answer.

    `found` is the running server. If it is None, the menu describes the server that would be
    started: with `model`, None for the demo, and `context`, its context length in tokens or None
    if that is not set. Raises ConfigError without a terminal, or if the input ends.
    """
    usage = f"run mlxcache launch CLIENT, where CLIENT is {' or '.join(CLIENTS)}"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(f"no client is given: {usage}")
    console = Console(stderr=True, highlight=False, markup=False)
    print_menu(console, found, model, context)
    numbers = {str(number): name for number, name in enumerate(CLIENTS, start=1)}
    choices = [*numbers, *(name.value for name in CLIENTS)]
    try:
        answer = Prompt.ask(
            "Which one", console=console, choices=choices, show_choices=False, default="1"
        )
    except EOFError as error:
        raise ConfigError(f"no client was chosen: {usage}") from error
    return numbers.get(answer) or ClientName(answer)


def print_menu(
    console: Console,
    found: Service | None,
    model: str | None,
    context: int | None,
    *,
    which: Which = shutil.which,
    memory: int | None = None,
) -> None:
    """Print the machine's memory, the model, and one entry for each client.

    `found`, `model` and `context` are as in `choose_client`. `which` finds a program on the PATH.
    `memory` in bytes replaces the machine's own. If `found` and `model` are None, a command with a
    model that fits the memory is printed too, on a line of its own, unwrapped, to be copied.
    """
    memory = machine_bytes() if memory is None else memory
    length = found.context if found is not None else context
    console.print(_server_line(found, model, length, memory))
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for number, client in enumerate(CLIENTS.values(), start=1):
        table.add_row(str(number), Text(client.name, "bold"), _description(client, length, which))
    console.print(table)
    if found is None and model is None:
        name, weights = _suggested_model(memory)
        console.print(
            "Without --model the built-in demo is served, whose replies have no meaning. A model "
            f"that fits this machine ({format_size(int(weights))} of {format_size(memory)}):"
        )
        line = f"{own_command()} launch claude --model {name}"
        console.print(Text(line, "cyan"), soft_wrap=True)


def _server_line(found: Service | None, model: str | None, context: int | None, memory: int) -> str:
    served = found.model if found is not None else model or "the built-in demo"
    length = f" with a context of {context:,} tokens" if context else ""
    how = f"{found.url} serves" if found is not None else "a server would be started for"
    return f"{format_size(memory)} of memory; {how} {served}{length}."


def _description(client: Client, context: int | None, which: Which) -> Text:
    text = Text(f"{client.title}: {client.good_for}. ")
    text.append(f"First prompt: {client.about_first_prompt}.")
    if context is not None and context < client.first_prompt * MIN_PROMPTS:
        text.append(" The context is too short for it.", "yellow")
    if which(client.name) is None:
        text.append(" Not installed.", "yellow")
    return text


def _suggested_model(memory: int) -> tuple[str, float]:
    return next((name, weights) for least, name, weights in MODELS if memory >= least)
