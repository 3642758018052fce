"""The command line of `mlxcache bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mlxcache.bench.process import Launch, parse_against
from mlxcache.bench.scenarios import PARTING, SCENARIOS
from mlxcache.bench.suite import DEFAULT, NAMES
from tests.toys.configs import FAMILIES

Model = Annotated[
    str | None, typer.Option(metavar="PATH|HUB_ID", help="Default: a small one made on the spot.")
]
Family = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A small model of this family, and prompts that part from one conversation. "
        f"One of {', '.join(FAMILIES)}. Repeatable.",
    ),
]
PromptTokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        min=512,
        help="Prompt tokens of a conversation's first turn (of all its turns, for --family). "
        "Default: 6000, for --family 4000.",
    ),
]
Runs = Annotated[int, typer.Option(min=1, help="Repetitions; medians are shown.")]
ReplyTokens = Annotated[
    int, typer.Option("--reply", min=2, max=1024, help="Tokens generated per reply.")
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=COMMAND",
        help="Another OpenAI-compatible server; {model} and {port} are filled in. Repeatable.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help=f"One of {', '.join(NAMES)}. Repeatable; default: the first {len(DEFAULT)}, "
        f"for --family {PARTING[0]} to {PARTING[-1]}.",
    ),
]
Keep = Annotated[
    bool,
    typer.Option(
        "--keep",
        help="Go on with the same conversations in each repetition, and begin them only once.",
    ),
]
MlxLm = Annotated[bool, typer.Option(help="Measure mlx_lm.server beside it.")]
Wait = Annotated[float, typer.Option(help="Seconds that a server has to start.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there too.")
]
Strict = Annotated[bool, typer.Option("--assert", help="Exit with 1 where a bound is broken.")]


def launches(against: Sequence[str]) -> list[Launch]:
    """How to start the servers that --against names. Raises typer.BadParameter."""
    try:
        return [parse_against(text) for text in against]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def names(only: Sequence[str], families: Sequence[str] = ()) -> Sequence[str]:
    """What --only names, the default if nothing. Raises typer.BadParameter."""
    known = list(SCENARIOS) if families else NAMES
    _all_of(only, known)
    return only or (PARTING if families else DEFAULT)


def families(named: Sequence[str], model: str | None) -> Sequence[str]:
    """What --family names. Raises typer.BadParameter."""
    _all_of(named, list(FAMILIES))
    if named and model is not None:
        raise typer.BadParameter("--family makes a model: leave out --model, or --family")
    return list(dict.fromkeys(named))


def _all_of(named: Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in named if name not in known]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}: not one of {', '.join(known)}")
