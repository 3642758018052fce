"""Error classes of mlxcache, and their tree.

    MlxcacheError
    ├── BadRequest              the request is wrong, or cannot be served as it is
    │   ├── Unsupported         the request needs something that this server lacks
    │   ├── ContextLengthExceeded   the prompt alone exceeds the context or the budget
    │   └── SnapshotRefused     a snapshot is damaged, or was made with another model
    ├── Unauthorized            the key is missing or wrong
    ├── NotFound                no such path, request, model or session
    ├── TooLarge                the body exceeds the size limit
    ├── Busy                    try again in `retry_after` seconds
    │   ├── QueueFull           the queue is full
    │   ├── TooMany             too many requests of one session are waiting
    │   └── NotReady            the model is still loading, or the server is stopping
    ├── DeadlineExceeded        the time limit of the request, or of the server, has passed
    ├── GenerationFailed        the model, its tokenizer or its template raised
    ├── ModelError              the model cannot be loaded or served
    ├── ConfigError             a flag, variable or key in config.toml is wrong
    └── StoreError              an operation of the disk tier failed
        ├── Corrupt             a file is damaged, or has the wrong content
        ├── Gone                a file was evicted before it was read
        ├── Vanished            the store's folder is missing; it is reopened within seconds
        ├── PrefixNotStored     the prefix that a run builds on is not on disk
        └── DiskFull            the limit, the reserve of free space, or the device is reached

`api.errors` maps each to its status and to each API's own shape.
"""

from __future__ import annotations


class MlxcacheError(Exception):
    """Root of the tree; `str(error)` is a sentence for the user."""


class BadRequest(MlxcacheError):
    """The request is wrong. `param` names the field, `code` is a stable word for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class Unsupported(BadRequest):
    """The request needs something that this server does not support."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "unsupported"):
        super().__init__(message, param=param, code=code)


class ContextLengthExceeded(BadRequest):
    """The prompt alone exceeds the context length or the memory budget."""

    def __init__(self, message: str, *, param: str | None = "messages"):
        super().__init__(message, param=param, code="context_length_exceeded")


class SnapshotRefused(BadRequest):
    """A snapshot is damaged, or was made with another model."""

    def __init__(self, message: str, *, code: str = "bad_snapshot"):
        super().__init__(message, code=code)


class Unauthorized(MlxcacheError):
    """The key is missing or wrong."""


class NotFound(MlxcacheError):
    """There is no such path, request, model or session."""


class TooLarge(MlxcacheError):
    """The body exceeds the server's size limit."""


class Busy(MlxcacheError):
    """The request cannot be served now; `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Busy):
    """The queue holds its maximum of waiting requests."""


class TooMany(Busy):
    """One session has its maximum of waiting requests."""


class NotReady(Busy):
    """The model is still loading, or the server is stopping."""


class DeadlineExceeded(MlxcacheError):
    """The request exceeded its time limit. Tokens computed so far stay cached."""


class GenerationFailed(MlxcacheError):
    """The model, its tokenizer or its chat template raised."""


class ModelError(MlxcacheError):
    """The model cannot be loaded, or not served with these settings."""


class ConfigError(MlxcacheError):
    """A flag, an environment variable or a key of config.toml is wrong."""


class StoreError(MlxcacheError):
    """An operation of the disk tier failed."""


class Corrupt(StoreError):
    """A file is damaged, or its content does not match its name."""


class Gone(StoreError):
    """A file was evicted between look-up and reading."""


class Vanished(StoreError):
    """The store's folder is missing or replaced; the server reopens it within seconds."""

    retry_after = 2.0


class PrefixNotStored(StoreError):
    """The prefix before a run is not on disk: an earlier run has to be written first."""


class DiskFull(StoreError):
    """The disk tier is full: its limit, the reserve of free space, or the device."""
