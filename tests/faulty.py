"""A server in which faults happen: `python -m tests.faulty FOLDER serve ...`.

A file in FOLDER turns the fault of its name on, and its text says how much of it; a fault ends with
its file. Nothing of this is in the product: functions of it are wrapped, in this process alone.

    die     the MLX thread raises
    hang    a forward pass does not return
    malloc  the next so many forward passes find no memory, as MLX says it
    nan     the next so many forward passes compute no numbers
    template, tokenizer  rendering and tokenising raise what nobody foresaw
    full    the disk has no room
    locked  the disk may not be written (read-only)
    slow    each file takes so many seconds to write
    clock   the wall clock is so many seconds off
"""

from __future__ import annotations

import errno
import faulthandler
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NO_MEMORY = "[malloc] Unable to allocate 17179869184 bytes."


class Fault(Exception):
    """Raised on purpose."""


class Panic(BaseException):
    """As a tokenizer's own: no Exception."""


class Faults:
    """Which faults are on."""

    def __init__(self, folder: Path):
        self.folder = folder

    def put(self, name: str, measure: object = "") -> None:
        """Turn a fault on."""
        temporary = self.folder / f".{name}"
        temporary.write_text(str(measure))
        temporary.rename(self.folder / name)

    def end(self, name: str) -> None:
        """Turn a fault off."""
        (self.folder / name).unlink(missing_ok=True)

    def on(self, name: str) -> str | None:
        """The measure of a fault, if it is on. While none is, no descriptor is needed to know."""
        if not (self.folder / name).exists():
            return None
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError:
            return None

    def takes(self, name: str) -> bool:
        """Whether a fault happens now; it does so as often as its measure says."""
        left = int(self.on(name) or 0)
        if left > 1:
            self.put(name, left - 1)
        elif left:
            self.end(name)
        return left > 0


def wrap(owner: Any, name: str, before: Callable[[], None]) -> None:
    """Have `before` called before each call of a function or method."""
    inner = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before()
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def install(faults: Faults) -> None:
    """Wrap what faults happen in."""
    from mlxcache.engine.runtime import Core
    from mlxcache.engine.scheduler import Scheduler
    from mlxcache.prompt.codec import Codec
    from mlxcache.prompt.template import Template
    from mlxcache.store import saving

    real = time.time
    time.time = lambda: real() + float(faults.on("clock") or 0)

    def die() -> None:
        if faults.on("die") is not None:
            raise Fault("on purpose")

    def disk() -> None:
        if faults.on("full") is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        if faults.on("locked") is not None:
            raise OSError(errno.EROFS, "Read-only file system")
        time.sleep(float(faults.on("slow") or 0))

    def breaks(name: str, error: BaseException) -> Callable[[], None]:
        def check() -> None:
            if faults.on(name) is not None:
                raise error

        return check

    wrap(Template, "render", breaks("template", OSError("no such macro")))
    wrap(Codec, "encode", breaks("tokenizer", Panic("no such byte")))
    wrap(Scheduler, "tick", die)
    wrap(saving, "write", disk)
    begin = Core.__init__

    def with_faults(core: Core, *args: Any) -> None:
        begin(core, *args)
        core.scheduler.prefill.model = core.scheduler.lanes.model = _Model(
            core.scheduler.model, faults
        )

    Core.__init__ = with_faults  # type: ignore[method-assign]


class _Model:
    """A model whose passes hang, or find no memory, or compute no numbers."""

    def __init__(self, model: Any, faults: Faults):
        self._model = model
        self._faults = faults

    def __call__(self, tokens: Any, **kwargs: Any) -> Any:
        while self._faults.on("hang") is not None:
            time.sleep(0.02)
        if self._faults.takes("malloc"):
            raise RuntimeError(NO_MEMORY)
        logits = self._model(tokens, **kwargs)
        return logits * float("nan") if self._faults.takes("nan") else logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


if __name__ == "__main__":
    from mlxcache.cli.main import main

    faulthandler.register(signal.SIGUSR2, all_threads=True)  # where it hangs, into its log
    install(Faults(Path(sys.argv.pop(1))))
    main()
