"""The wall around each request: an exception in its own code ends that request and nothing else.

What ends the MLX thread, and with it the process, once committed KV was written to disk:

- a device error, the third in a row with nothing computed between them (`Scheduler.recover`)
- GroupLost: another rank of a divided model is gone, or has made different passes
- Inconsistent: the KV contradicts its accounts, or the thread's own loop fails again and again

Every other exception is contained. MLX thread only.
"""

from __future__ import annotations

import logging

from mlxcache.errors import GenerationFailed, MlxcacheError
from mlxcache.model import device

log = logging.getLogger("mlxcache.engine")


class Wall:
    """Contains exceptions of requests for one model, and counts those that nobody expected."""

    def __init__(self) -> None:
        self.contained = 0

    def pass_on(self, error: Exception) -> None:
        """Raise `error` if it concerns more than one request."""
        if device.is_device_error(error):
            raise error

    def check_recovery(self, error: RuntimeError) -> None:
        """Raise GroupLost if requests cannot begin again after the device error `error`."""

    def contain(self, error: Exception, what: str) -> None:
        """Log `error` with its traceback and count it; `what` says what failed and what follows.

        Raises what `pass_on` raises.
        """
        self.pass_on(error)
        self.contained += 1
        log.error("%s: %s", what, error, exc_info=error)

    def failure(self, error: Exception, id: str) -> MlxcacheError:
        """Return the error for the client of request `id`, whose own code raised `error`.

        Waits for the device and raises its error, because a failed pass may be the cause. Otherwise
        raises what `pass_on` raises.
        """
        self.pass_on(error)
        device.confirm()
        if isinstance(error, MlxcacheError):
            return error
        self.contain(error, f"{id}: request failed: unexpected exception")
        return GenerationFailed(f"The model failed: {error}")
