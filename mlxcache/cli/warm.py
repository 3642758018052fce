"""The command `mlxcache warm`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mlxcache.cli.output import reporting
from mlxcache.cli.progress import count_bar
from mlxcache.cli.show import Result
from mlxcache.cli.target import ApiKey, CacheDir, Json, Url, find_server
from mlxcache.errors import MlxcacheError


def warm(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            allow_dash=True,
            help="A chat request of either API as JSON, or a system prompt; - for standard input.",
        ),
    ],
    *,
    as_json: Json = False,
    url: Url = None,
    api_key: ApiKey = None,
    cache_dir: CacheDir = None,
) -> None:
    """Compute a prefix ahead of its first use, so that the first turn is warm.

    Needs a running server.
    """
    with reporting():
        target, body = find_server(url, api_key, cache_dir), read_input(file)
        with count_bar("computing, in tokens") as progress:
            found = target.warm(body, progress)
        text = (
            f"Warm: {found['prompt_tokens']:,} tokens, of which {found['fed_tokens']:,} were "
            f"computed in {found['seconds']:.1f} s"
        )
        Result(found, text).print(as_json=as_json)


def read_input(file: Path) -> bytes:
    """Read a file; `-` is standard input. Blocks. Raises MlxcacheError."""
    try:
        return typer.get_binary_stream("stdin").read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise MlxcacheError(f"{file} cannot be read: {error.strerror}.") from error
