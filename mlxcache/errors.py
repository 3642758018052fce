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
    │   ├── TooMany             too many requests of a session, or streams of a client
    │   └── NotReady            the model cannot run now, or the server is stopping
    ├── DeadlineExceeded        the time limit of the request, or of the server, has passed
    ├── GenerationFailed        the model, its tokenizer or its template failed
    ├── ModelError              the model cannot be loaded or served
    ├── ConfigError             a flag, variable or key in config.toml is wrong
    ├── RemoteUnavailable       the shared remote is gone, too slow, refuses or is skipped
    ├── StoreError              an operation of the disk tier failed
    │   ├── Corrupt             a file is damaged, or has the wrong content
    │   ├── Gone                a file was evicted before it was read
    │   ├── Vanished            the store's folder is missing; it is reopened within seconds
    │   ├── PrefixNotStored     the prefix that a run builds on is not on disk
    │   └── DiskFull            the disk is full, or the limit of the disk tier is reached

GroupLost and Inconsistent stand apart, because they end the process.

`api.errors` maps each to its HTTP status, and to the error body of each API.
"""

from __future__ import annotations


class MlxcacheError(Exception):
    """Base class of all errors of mlxcache. `str(error)` is a sentence for the user."""


class BadRequest(MlxcacheError):
    """`param` names the wrong field. `code` is a stable word for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class Unsupported(BadRequest):
    def __init__(self, message: str, *, param: str | None = None, code: str = "unsupported"):
        super().__init__(message, param=param, code=code)


class ContextLengthExceeded(BadRequest):
    def __init__(self, message: str, *, param: str | None = "messages"):
        super().__init__(message, param=param, code="context_length_exceeded")


class SnapshotRefused(BadRequest):
    def __init__(self, message: str, *, code: str = "bad_snapshot"):
        super().__init__(message, code=code)


class Unauthorized(MlxcacheError): ...


class NotFound(MlxcacheError): ...


class TooLarge(MlxcacheError): ...


class Busy(MlxcacheError):
    """The client may try again after `retry_after` seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Busy): ...


class TooMany(Busy): ...


class NotReady(Busy): ...


class DeadlineExceeded(MlxcacheError): ...


class GenerationFailed(MlxcacheError): ...


class GroupLost(BaseException):
    """Ends the group of ranks that serve a divided model, and their processes.

    Raised if another rank failed, hangs or cannot be reached, or if an operation failed on this
    rank: ranks that made different operations cannot go on together. It is no Exception, so that
    nothing that handles the failure of one request catches it.
    """


class Inconsistent(BaseException):
    """Ends the MLX thread, because its own state is wrong. No Exception, as GroupLost.

    Raised if the KV contradicts its accounts, so that going on could serve wrong tokens or leak
    memory, or if the thread's loop fails again and again.
    """


class ModelError(MlxcacheError): ...


class ConfigError(MlxcacheError): ...


class StoreError(MlxcacheError): ...


class Corrupt(StoreError): ...


class Gone(StoreError): ...


class Vanished(StoreError):
    retry_after = 2.0


class PrefixNotStored(StoreError): ...


class DiskFull(StoreError): ...


class RemoteUnavailable(MlxcacheError): ...
