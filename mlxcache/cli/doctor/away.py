"""Check of `mlxcache doctor` for the shared remote."""

from __future__ import annotations

import time
from contextlib import closing, suppress

from mlxcache.cli.doctor.finding import Finding
from mlxcache.config import Settings
from mlxcache.errors import ConfigError, RemoteUnavailable


def examine_remote(settings: Settings) -> Finding:
    """Open the remote, check its key, and write, read and delete a small object.

    The key of --remote-key-file, or its absence, must be the same as on the servers which use the
    remote. If no server has used it yet, any key is accepted, and no marker is written: the first
    server writes it. The settings must have a remote. The status is `warn` if the remote cannot be
    reached, and `fail` for a wrong key or a wrong content of the object. Blocks for seconds.
    """
    from mlxcache.remote.objects import TRIAL, open_configured  # noqa: PLC0415 - only with --remote

    try:
        objects = open_configured(settings, marks=False)
    except ConfigError as error:
        return Finding("remote", "fail", str(error), "see docs/remote.md")
    content, found, took = str(time.time_ns()).encode(), None, 0.0
    with closing(objects), suppress(RemoteUnavailable):  # which its state tells
        began = time.perf_counter()
        objects.put(TRIAL, content)
        found = objects.get(TRIAL)
        took = time.perf_counter() - began
        objects.delete(TRIAL)
    figures = objects.figures()
    if figures["state"] != "ok":
        value = f"{figures['url']} is {figures['state']}: {figures['reason']}"
        remedy = "servers run without it; check the address, the credentials and the network"
        return Finding("remote", "warn", value, remedy)
    if found != content:
        value = f"{figures['url']} did not return what was written"
        return Finding("remote", "fail", value, "use storage that is consistent")
    sealed = "sealed" if figures["sealed"] else "not sealed: add --remote-key-file"
    value = f"{figures['url']} writes and reads in {1000 * took:.0f} ms; {sealed}"
    return Finding("remote", "ok", value, figures={"round_trip_s": round(took, 3)})
