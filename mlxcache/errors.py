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
    """Error in the request. `param` names the field, `code` is a stable word for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class Unsupported(BadRequest):
    """Request for something that this server does not support."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "unsupported"):
        super().__init__(message, param=param, code=code)


class ContextLengthExceeded(BadRequest):
    """Prompt that alone exceeds the context length or the memory budget."""

    def __init__(self, message: str, *, param: str | None = "messages"):
        super().__init__(message, param=param, code="context_length_exceeded")


class SnapshotRefused(BadRequest):
    """Snapshot that is damaged, or was made with another model."""

    def __init__(self, message: str, *, code: str = "bad_snapshot"):
        super().__init__(message, code=code)


class Unauthorized(MlxcacheError):
    """Missing or wrong key."""


class NotFound(MlxcacheError):
    """Path, request, model or session that does not exist."""


class TooLarge(MlxcacheError):
    """Body that exceeds the server's size limit."""


class Busy(MlxcacheError):
    """Request that cannot be served now; `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Busy):
    """Queue that holds its maximum of waiting requests."""


class TooMany(Busy):
    """Session that has its maximum of waiting requests."""


class NotReady(Busy):
    """Request to a server whose model is still loading, or that is stopping."""


class DeadlineExceeded(MlxcacheError):
    """Request that exceeded its time limit. Tokens computed so far stay cached."""


class GenerationFailed(MlxcacheError):
    """Exception from the model, its tokenizer or its chat template."""


class ModelError(MlxcacheError):
    """Model that cannot be loaded, or not served with these settings."""


class ConfigError(MlxcacheError):
    """Wrong flag, environment variable or key of config.toml."""


class StoreError(MlxcacheError):
    """Failed operation of the disk tier."""


class Corrupt(StoreError):
    """File that is damaged, or whose content does not match its name."""


class Gone(StoreError):
    """File that was evicted between look-up and reading."""


class Vanished(StoreError):
    """Store folder that is missing or replaced; the server reopens it within seconds."""

    retry_after = 2.0


class PrefixNotStored(StoreError):
    """Missing prefix of a run on disk: an earlier run has to be written first."""


class DiskFull(StoreError):
    """Full disk tier: its limit, the reserve of free space, or the device is reached."""
