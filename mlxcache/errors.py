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
    """Error raised if a request is wrong.

    `param` names the wrong field. `code` is a stable word for programs.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class Unsupported(BadRequest):
    """Error raised if a request needs something that this server does not support."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "unsupported"):
        super().__init__(message, param=param, code=code)


class ContextLengthExceeded(BadRequest):
    """Error raised if a prompt alone exceeds the context length or the memory budget."""

    def __init__(self, message: str, *, param: str | None = "messages"):
        super().__init__(message, param=param, code="context_length_exceeded")


class SnapshotRefused(BadRequest):
    """Error raised if a snapshot is damaged or was made with another model."""

    def __init__(self, message: str, *, code: str = "bad_snapshot"):
        super().__init__(message, code=code)


class Unauthorized(MlxcacheError):
    """Error raised if the API key is missing or wrong."""


class NotFound(MlxcacheError):
    """Error raised if a path, request, model or session does not exist."""


class TooLarge(MlxcacheError):
    """Error raised if a request body exceeds the server's size limit."""


class Busy(MlxcacheError):
    """Error raised if a request cannot be served now.

    `retry_after` is the number of seconds after which the client may try again.
    """

    def __init__(self, message: str, *, retry_after: float = 1.0):
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Busy):
    """Error raised if the maximum number of requests is already waiting."""


class TooMany(Busy):
    """Error raised if one session has too many waiting requests, or one client too many streams."""


class NotReady(Busy):
    """Error raised if the model cannot run now, or the server is stopping.

    The model is still loading, or its files have changed while it was unloaded.
    """


class DeadlineExceeded(MlxcacheError):
    """Error raised if a request exceeds its time limit. Its computed tokens stay cached."""


class GenerationFailed(MlxcacheError):
    """Error raised if the model, its tokenizer or its chat template fails."""


class GroupLost(BaseException):
    """Exception that ends the group of ranks that serve a divided model, and their processes.

    Raised if another rank failed, hangs or cannot be reached, or if an operation failed on this
    rank: ranks that made different operations cannot go on together. It is no Exception, so that
    nothing that handles the failure of one request catches it. `str(error)` says why.
    """


class Inconsistent(BaseException):
    """Exception that ends the MLX thread, because its own state is wrong.

    It is no Exception, for the reason that GroupLost is none. Raised if the KV contradicts its
    accounts, so that going on could serve wrong tokens or leak memory, or if the thread's loop
    fails again and again. `str(error)` says why.
    """


class ModelError(MlxcacheError):
    """Error raised if a model cannot be loaded, or cannot be served with these settings."""


class ConfigError(MlxcacheError):
    """Error raised if a flag, an environment variable or a key of config.toml is wrong."""


class StoreError(MlxcacheError):
    """Error raised if an operation of the disk tier fails."""


class Corrupt(StoreError):
    """Error raised if a file is damaged, or its content does not match its name."""


class Gone(StoreError):
    """Error raised if a file was evicted between look-up and reading."""


class Vanished(StoreError):
    """Error raised if the store's folder is missing or was replaced.

    The server reopens the folder within seconds. `retry_after` is the number of seconds after
    which the client may try again.
    """

    retry_after = 2.0


class PrefixNotStored(StoreError):
    """Error raised if the prefix on which a run builds is not on disk.

    The earlier run must be written first.
    """


class DiskFull(StoreError):
    """Error raised if what is to be written does not fit on the disk.

    Either the disk is full, or it must keep its free space for other programs, or the limit of the
    disk tier would be exceeded.
    """


class RemoteUnavailable(MlxcacheError):
    """Error raised if the shared remote is gone, slow, refuses, or is skipped after failures."""
