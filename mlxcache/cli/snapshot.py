"""The commands `mlxcache snapshot` and `mlxcache restore`: export and import a session."""

from __future__ import annotations

import os
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mlxcache.cli import show
from mlxcache.cli.options import Where, located
from mlxcache.cli.output import Yes, confirm, visible
from mlxcache.cli.progress import byte_bar
from mlxcache.cli.sessions import Id, find_session
from mlxcache.cli.show import Result, format_count
from mlxcache.config import format_size
from mlxcache.errors import ConfigError, MlxcacheError, SnapshotRefused
from mlxcache.names import clean_name

_EXPECTED = (
    "Expected a file written by `mlxcache snapshot ID -o FILE` or by mlx-lm's "
    "`mlx_lm.cache_prompt`."
)
_HEAD = 4096
_SHOWN_CHARS = 40
_LENGTH = 8  # bytes of the length field before a safetensors header
_OFFSETS = b'"data_offsets"'  # a key of each tensor in a safetensors header

_ARCHIVES = (
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "zip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)


class Format(StrEnum):
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
        typer.Option(help="mlx-lm writes a file for mlx_lm.generate --prompt-cache-file."),
    ] = Format.MLXCACHE,
    yes: Yes = False,
) -> Result:
    """Write a session to one file, to continue it on another machine or server.

    Asks for confirmation before replacing a file, unless --yes is given.
    """
    if str(output) == "-":
        raise ConfigError("--output must be a file: a snapshot cannot go to standard output")
    _confirm_replacing(output, yes=yes)
    sessions = where.sessions()
    found = find_session(sessions, id)
    part = output.with_name(f".{output.name}.part")
    try:
        with byte_bar("writing") as progress:
            size = where.snapshot(found, part, format.value, progress)
        part.replace(output)
    except OSError as error:
        raise MlxcacheError(f"{output} cannot be written: {error.strerror}.") from error
    finally:
        part.unlink(missing_ok=True)
    written = {"id": found, "path": str(output), "bytes": size}
    one = next(one for one in sessions if one["id"] == found)
    text = f"Wrote {output}: {format_size(size)}"
    if show.has_several_models(sessions):
        text += f", of {visible(one['model'])}"
    return Result(written, text)


def _confirm_replacing(path: Path, *, yes: bool) -> None:
    try:
        if not path.exists():
            return
        if not path.is_file():
            raise ConfigError(f"--output must be a regular file, and {path} is none")
        size = format_size(path.stat().st_size)
    except OSError as error:
        raise MlxcacheError(f"{path} cannot be written: {error.strerror}.") from error
    confirm(f"{path} exists ({size}). Replace it?", yes=yes)


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
        str | None, typer.Option(metavar="NAME", help="Name of the new session.")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="The prompt given to mlx_lm.cache_prompt, as text or a JSON list of token ids; "
            "- reads standard input. Needs a server.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The model, if the server has several. Default: the file's own, or for a prompt "
            "cache that does not name one of them the default model.",
        ),
    ] = None,
) -> Result:
    """Import a session from a snapshot or a prompt cache of mlx-lm; its next turn is warm."""
    name = None if name is None else clean_name(name)
    check_snapshot(file)
    if prompt == "-":
        prompt = typer.get_text_stream("stdin").read()
    with byte_bar("reading") as progress:
        made = where.restore(file, name, prompt, model, progress)
    of_model = f"of {visible(made['model'])}"
    text = f"Imported {format_count(made['tokens'], 'token')} {of_model}: {made['id']}"
    return Result(made, text)


def check_snapshot(file: Path) -> None:
    """Raise MlxcacheError, which says what the file is, if `file` can be no snapshot."""
    # numpy takes a while, and --help needs none of it
    from mlxcache.safetensors import OPENING  # noqa: PLC0415
    from mlxcache.store.snapshot_format import FORMAT, detect_format  # noqa: PLC0415

    try:
        detect_format(file)
    except SnapshotRefused as error:
        try:
            with file.open("rb") as opened:
                head, size = opened.read(_HEAD), os.fstat(opened.fileno()).st_size
        except OSError as failure:
            raise MlxcacheError(f"{file} cannot be read: {failure.strerror}.") from failure
        header = head[_LENGTH:]
        if header.startswith(OPENING) or f'"{FORMAT}"'.encode() in header:
            raise MlxcacheError(
                f"{file} is a damaged snapshot: {_reason(error)}. Copy it again, or take it again "
                "with `mlxcache snapshot`."
            ) from error
        raise MlxcacheError(
            f"{file} is not a snapshot: {_describe_wrong(head, size, error)}. {_EXPECTED}"
        ) from error


def _reason(error: SnapshotRefused) -> str:
    return str(error.__cause__ or error).rstrip(".")


def _describe_wrong(head: bytes, size: int, error: SnapshotRefused) -> str:
    if not head:
        return "it is empty"
    for start, name in _ARCHIVES:
        if head.startswith(start):
            return f"it is compressed with {name}; unpack it first"
    if _OFFSETS in head[_LENGTH:]:
        damage = f"; {_reason(error)}" if error.__cause__ else ""
        return f"it is a safetensors file of another kind, such as weights{damage}"
    with suppress(UnicodeDecodeError):
        text = head.decode(errors="strict" if len(head) < _HEAD else "ignore").strip()
        shown = text[:_SHOWN_CHARS]
        if all(c.isprintable() or c.isspace() for c in shown):
            return f"it is a text that begins with {shown!r}"
    return f"it is {format_size(size)} of an unknown format"
