"""A shared remote as the target of `mlxcache cache stats` and `prune`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from mlxcache.cli import show
from mlxcache.cli.output import console
from mlxcache.cli.progress import count_bar
from mlxcache.cli.show import Result
from mlxcache.config import Settings, format_size
from mlxcache.config.remote import read_remote_key
from mlxcache.config.values import read_duration
from mlxcache.errors import ConfigError


def show_remote(settings: Settings) -> Result:
    """Count the objects of the remote of `settings`, which must have one.

    The result has the number of objects and their bytes by kind, such as `run`, and the bytes by
    age. Blocks. Raises ConfigError if the remote's key cannot be read, and RemoteUnavailable.
    """
    from mlxcache.remote.maintenance import measure  # noqa: PLC0415 - only with --remote
    from mlxcache.remote.objects import form_of  # noqa: PLC0415

    assert settings.remote is not None
    file = settings.remote_key_file
    form = form_of(None if file is None else read_remote_key(file))
    with count_bar("listing the objects") as progress:
        held = measure(settings.remote, form, lambda count: progress(count, 0))
    found = {
        "object": "remote",
        "url": str(settings.remote),
        "objects": held.counts.total(),
        "bytes": held.kinds.total(),
        "kinds": {
            kind: {"objects": held.counts[kind], "bytes": size}
            for kind, size in held.kinds.most_common()
        },
        "ages": dict(held.ages),
        "oldest_at": held.oldest.timestamp() if held.oldest is not None else None,
    }
    return Result(found, partial(_print_remote, found))


def _print_remote(found: Mapping[str, Any]) -> None:
    objects = show.format_count(found["objects"], "object")
    console().print(f"{found['url']}: {objects}, {format_size(found['bytes'])}")
    if found["objects"]:
        columns = (("kind", "left"), ("objects", "right"), ("size", "right"))
        rows = (
            (kind, f"{one['objects']:,}", format_size(one["bytes"]))
            for kind, one in found["kinds"].items()
        )
        show.print_table(columns, rows)
        rows_of_ages = ((age, format_size(size)) for age, size in found["ages"].items())
        show.print_table((("written", "left"), ("size", "right")), rows_of_ages)


def prune_remote(settings: Settings, older_than: str | None) -> Result:
    """Remove the objects that were written more than `older_than` ago from the remote. Blocks.

    The remote is that of `settings`, which must have one. `older_than` is a duration such as `30d`.
    Raises ConfigError for None or text that is no duration, and RemoteUnavailable.
    """
    from mlxcache.remote.maintenance import prune  # noqa: PLC0415 - only with --remote

    assert settings.remote is not None
    if older_than is None:
        raise ConfigError("prune of a remote needs an age: add --older-than 30d")
    try:
        age = timedelta(seconds=read_duration(older_than))
    except ValueError as error:
        raise ConfigError(f"--older-than {error}") from error
    with count_bar("removing old objects") as progress:
        count, freed = prune(settings.remote, age, lambda count: progress(count, 0))
    found = {"object": "remote.pruned", "objects": count, "freed_bytes": freed}
    removed = show.format_count(count, "object")
    return Result(found, f"Removed {removed}, {format_size(freed)}, from {settings.remote}")
