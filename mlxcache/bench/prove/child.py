"""Run a scenario of the module `within` in a child process."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace

from mlxcache.bench.process import run_to_end, tail
from mlxcache.bench.prove.context import Context, NotApplicable, Subject
from mlxcache.bench.prove.scale import Scale

CONTEXT_SHARE = 0.75
"""Maximum share of the model's context for a prefix; the rest is left for replies."""


class ChildFailed(Exception):
    """Error raised if the child process of a scenario fails.

    The text has the exit status and the last lines of standard error.
    """


def in_child(name: str) -> Callable[[Context], None]:
    """Return a function that runs the scenario `name` of the module `within` in a child process.

    The function adds the scenario's results to `Context.found`. It raises ChildFailed if the
    process fails, and NotApplicable if the scenario cannot run on the context's model.
    """

    def play(context: Context) -> None:
        if not context.fits(name, scale_for(context.subject, context.scale).deep):
            return
        context.on_step("an engine of its own")
        folder = context.folder / f"within-{name}"
        options = {
            "model": str(context.subject.path),
            "folder": str(folder),
            "scale": asdict(scale_for(context.subject, context.scale)),
        }
        module = "mlxcache.bench.prove.within"
        command = [sys.executable, "-m", module, name, json.dumps(options)]
        log = context.folder / f"within-{name}.log"
        status, printed = run_to_end(command, log)
        if status or not printed:
            raise ChildFailed(f"{name} ended with status {status}\n{tail(log, 12)}")
        value = json.loads(printed[-1])
        if value["status"] == "not applicable":
            raise NotApplicable(value["error"])
        context.found.merge(value)

    return play


def scale_for(subject: Subject, scale: Scale) -> Scale:
    """Return `scale` with `deep` and `disk_bytes` reduced to what the model's context allows.

    `subject` is the model. `deep` becomes at most the share `CONTEXT_SHARE` of its context, and
    `disk_bytes` at most the KV of as many tokens. If the length of the context is unknown, `scale`
    is returned unchanged.
    """
    most = round(CONTEXT_SHARE * subject.context_length)
    if not most:
        return scale
    nbytes = most * (subject.kv_bytes_per_token or scale.disk_bytes)
    return replace(scale, deep=min(scale.deep, most), disk_bytes=min(scale.disk_bytes, nbytes))
