"""A server with fault injection: `python -m tests.faulty FOLDER serve ...`.

A file in FOLDER turns on the fault of the same name until it is removed; its text is the measure N.
The product has no code for faults: some of its functions are wrapped in this process.

    die     the MLX thread raises
    hang    forward passes block
    malloc  the next N forward passes fail with MLX's out-of-memory error
    nan     the next N forward passes return NaN
    template, tokenizer  rendering and tokenising raise an unexpected error
    full    writes fail: no space left on the device
    locked  writes fail: read-only file system
    slow    each file takes N seconds to write
    clock   the wall clock is N seconds off
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

from mlxcache.errors import Inconsistent

NO_MEMORY = "[malloc] Unable to allocate 17179869184 bytes."


class Fault(Inconsistent):
    """Error raised by the fault `die`."""


class Panic(BaseException):
    """Error of a tokenizer written in Rust: a BaseException, not an Exception."""


class Faults:
    """Faults that are on, as files in `folder`; shared with the process that sets them."""

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
        """Return the measure of a fault, None if it is off. Opens no file while it is off."""
        if not (self.folder / name).exists():
            return None
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError:
            return None

    def takes(self, name: str) -> bool:
        """Return True if a counted fault happens now, and count its measure down."""
        left = int(self.on(name) or 0)
        if left > 1:
            self.put(name, left - 1)
        elif left:
            self.end(name)
        return left > 0


def wrap(owner: Any, name: str, before: Callable[[], None]) -> None:
    """Wrap a function or method of `owner`, so that `before` is called before each call."""
    inner = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before()
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


def install(faults: Faults) -> None:
    """Wrap the functions of the server in which faults happen."""
    from mlxcache.engine.runtime import ModelRuntime
    from mlxcache.prompt.codec import Codec
    from mlxcache.prompt.template import Template
    from mlxcache.scheduling.scheduler import Scheduler
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
    wrap(Scheduler, "step", die)
    wrap(saving, "write", disk)
    begin = ModelRuntime.__init__

    def with_faults(core: ModelRuntime, *args: Any, **kwargs: Any) -> None:
        begin(core, *args, **kwargs)
        core.scheduler.prefill.model = core.scheduler.lanes.model = _Model(
            core.scheduler.model, faults
        )

    ModelRuntime.__init__ = with_faults  # type: ignore[assignment, method-assign]


class _Model:
    """A model with the faults `hang`, `malloc` and `nan` in its forward passes."""

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

    faulthandler.register(signal.SIGUSR2, all_threads=True)  # prints all stacks to the log
    install(Faults(Path(sys.argv.pop(1))))
    main()
