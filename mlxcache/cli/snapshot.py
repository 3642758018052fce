"""`mlxcache snapshot` and `mlxcache restore`: a session as a file, and back."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mlxcache.cli import show
from mlxcache.cli.output import console
from mlxcache.cli.progress import moving
from mlxcache.cli.sessions import Id, find
from mlxcache.cli.target import Json, Where, located
from mlxcache.config import format_size
from mlxcache.errors import ConfigError, MlxcacheError


class Format(StrEnum):
    """Whose file it is to be."""

    MLXCACHE = "mlxcache"
    MLX_LM = "mlx-lm"


@located
def snapshot(
    where: Where,
    id: Id,
    *,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", dir_okay=False, help="The file to write."),
    ],
    format: Annotated[
        Format,
        typer.Option(help="mlx-lm: for mlx_lm.generate --prompt-cache-file."),
    ] = Format.MLXCACHE,
    as_json: Json = False,
) -> None:
    """Write a session to one file, to go on with it elsewhere."""
    if str(output) == "-":
        raise ConfigError("--output must be a file: a snapshot cannot go to the standard output")
    found = find(where.sessions(), id)
    part = output.with_name(f".{output.name}.part")
    try:
        with moving("writing") as progress:
            size = where.snapshot(found, part, format.value, progress)
        part.replace(output)
    except OSError as error:
        raise MlxcacheError(f"{output} cannot be written: {error.strerror}.") from error
    finally:
        part.unlink(missing_ok=True)
    if as_json:
        show.print_json({"id": found, "path": str(output), "bytes": size})
    else:
        console().print(f"Wrote {output}: {format_size(size)}")


@located
def restore(
    where: Where,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", exists=True, dir_okay=False, readable=True, help="A snapshot."
        ),
    ],
    *,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="What to call the session.")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What mlx_lm.cache_prompt made the file of, as text or a JSON list of token ids; "
            "- is the input. Needs a server.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Import a session from a snapshot, or from a file of mlx-lm's; its next turn is warm."""
    # Here and not above: numpy takes a while, and --help needs none of it.
    from mlxcache.cli.snapshot_file import check  # noqa: PLC0415

    check(file)
    if prompt == "-":
        prompt = typer.get_text_stream("stdin").read()
    with moving("reading") as progress:
        made = where.restore(file, name, prompt, progress)
    if as_json:
        show.print_json(made)
    else:
        console().print(f"Imported {made['tokens']:,} tokens: {made['id']}")
