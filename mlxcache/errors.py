"""Every error that mlxcache raises on purpose.

    MlxcacheError
    ├── BadRequest              the client's body cannot be served as it is
    │   ├── Unsupported         it asks for something that this server does not do
    │   ├── ContextLengthExceeded   the prompt alone exceeds the context or the budget
    │   └── SnapshotRefused     a snapshot is damaged, or of another model
    ├── Unauthorized            no key, or a wrong one
    ├── NotFound                no such path, request or session
    ├── TooLarge                the body exceeds the limit
    ├── Busy                    try again later; carries `retry_after` in seconds
    │   ├── QueueFull           too many requests wait
    │   ├── TooMany             too many requests of one session wait
    │   └── NotReady            the model is still loading, or the server is stopping
    ├── DeadlineExceeded        the request's own time, or the server's for each, is over
    ├── GenerationFailed        the model or its template raised; nothing was made up
    ├── ModelError              the model cannot be loaded or served
    ├── ConfigError             a flag, variable or key in config.toml is wrong
    └── StoreError              the disk tier could not do as asked
        ├── Corrupt             a file is damaged, or not what it should be
        ├── Gone                a file was evicted meanwhile
        ├── Vanished            the folder is gone; it is made again in a moment
        ├── PrefixNotStored     the prefix that a run builds on is not on disk
        └── DiskFull            no room: the cap, the floor of free space, or the device

`api.errors` maps each to its status and to each API's own shape.
"""

from __future__ import annotations


class MlxcacheError(Exception):
    """The root: `str(error)` is a sentence for the person at the other end."""


class BadRequest(MlxcacheError):
    """The request is wrong; `param` names the field, `code` is a stable word for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class Unsupported(BadRequest):
    """The request asks for something that this server does not do."""

    def __init__(self, message: str, *, param: str | None = None):
        super().__init__(message, param=param, code="unsupported")


class ContextLengthExceeded(BadRequest):
    """The prompt is longer than the context, or could never fit the memory budget."""

    def __init__(self, message: str, *, param: str | None = "messages"):
        super().__init__(message, param=param, code="context_length_exceeded")


class SnapshotRefused(BadRequest):
    """A snapshot is damaged, or was made with another model."""

    def __init__(self, message: str, *, code: str = "bad_snapshot"):
        super().__init__(message, code=code)


class Unauthorized(MlxcacheError):
    """No key was given, or a wrong one."""


class NotFound(MlxcacheError):
    """No such path, request, model or session."""


class TooLarge(MlxcacheError):
    """The body exceeds the server's limit."""


class Busy(MlxcacheError):
    """Not now; `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Busy):
    """As many requests as the queue holds are already waiting."""


class TooMany(Busy):
    """One session has as many requests waiting as it may have."""


class NotReady(Busy):
    """The model is still loading, or the server is stopping."""


class DeadlineExceeded(MlxcacheError):
    """The request was not done in its time; what was computed is kept."""


class GenerationFailed(MlxcacheError):
    """The model, its tokenizer or its template raised."""


class ModelError(MlxcacheError):
    """The model cannot be loaded, or cannot be served as asked."""


class ConfigError(MlxcacheError):
    """A flag, an environment variable or a key of config.toml is wrong."""


class StoreError(MlxcacheError):
    """The disk tier could not do as asked."""


class Corrupt(StoreError):
    """A file is damaged, or not what its place and name say."""


class Gone(StoreError):
    """A file was evicted between being found and being read."""


class Vanished(StoreError):
    """The folder is not there, or another one is; it is made again, or found, in a moment."""

    retry_after = 2.0


class PrefixNotStored(StoreError):
    """The prefix that a run builds on is not on disk: write from further up."""


class DiskFull(StoreError):
    """There is no room, by the cap, the floor of free space or the device."""
