"""The command `mlxcache trace`: record the requests of a running server without any text."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from mlxcache.cli.output import console
from mlxcache.cli.show import Result, format_count
from mlxcache.cli.target import Where, find_server, located
from mlxcache.errors import MlxcacheError
from mlxcache.private import create

if TYPE_CHECKING:
    from mlxcache.cli.remote import Remote


@partial(located, find=find_server)
def trace(
    where: Where,
    *,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="File to write.")
    ] = Path("trace.jsonl"),
    minutes: Annotated[
        float | None, typer.Option(metavar="N", min=0.001, help="End after so many minutes.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="End after so many requests.")
    ] = None,
) -> Result:
    """Record the requests of a running server as a trace without any text.

    Each line has a request's times and lengths, and the names of its blocks of tokens. The names
    are made with a random key that is not stored. Read the file with `mlxcache plan --trace`. Needs
    a running server; Ctrl-C ends the recording.
    """
    try:
        with create(output) as file:
            console(stderr=True).print(f"Recording to {output}; Ctrl-C ends it.")
            count = record(where, file, minutes, requests)
    except OSError as error:
        raise MlxcacheError(f"{output} cannot be written: {error.strerror}.") from error
    found = {"object": "trace", "path": str(output), "requests": count}
    return Result(found, f"{format_count(count, 'request')} in {output}")


def record(where: Remote, file: BinaryIO, minutes: float | None, requests: int | None) -> int:
    """Record the requests of the server `where` to `file`; return the number of requests.

    Blocks until `minutes` have passed, so many `requests` are recorded, or Ctrl-C is pressed; None
    stands for no such limit. Raises MlxcacheError if the server ends the recording or cannot be
    reached; the lines so far are written.
    """
    count, began = 0, time.monotonic()
    with suppress(KeyboardInterrupt):
        for name, body in where.trace():
            if name == "end":
                file.flush()
                raise MlxcacheError(
                    f"The server ended the recording after {format_count(count, 'request')}: "
                    f"{body['reason']}."
                )
            if name:
                file.write(json.dumps(body, separators=(",", ":")).encode() + b"\n")
                file.flush()
                count += name == "request"
            over = minutes is not None and time.monotonic() - began >= 60 * minutes
            if over or count == requests:
                break
    return count
