"""The command `mlxcache warm`: compute a prompt's prefix ahead of its first use."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mlxcache.cli.progress import count_bar
from mlxcache.cli.show import Result, format_count, format_duration
from mlxcache.cli.target import Where, find_server, located
from mlxcache.errors import MlxcacheError


@partial(located, find=find_server)
def warm(
    where: Where,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            allow_dash=True,
            help="A chat request of any API as JSON, or a system prompt; - for standard input.",
        ),
    ],
) -> Result:
    """Compute a prefix ahead of its first use, so that the first turn is warm.

    Needs a running server.
    """
    body = read_input(file)
    with count_bar("computing, in tokens") as progress:
        found = where.warm(body, progress)
    text = (
        f"Warm: {format_count(found['prompt_tokens'], 'token')}, {found['fed_tokens']:,} of them "
        f"computed in {format_duration(found['seconds'])}"
    )
    return Result(found, text)


def read_input(file: Path) -> bytes:
    """Read the whole of `file`, or of standard input if it is `-`. Blocks.

    Raises MlxcacheError if it cannot be read.
    """
    try:
        return typer.get_binary_stream("stdin").read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise MlxcacheError(f"{file} cannot be read: {error.strerror}.") from error
