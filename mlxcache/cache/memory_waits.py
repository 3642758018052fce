"""Waits of one model's requests for memory that other models hold. MLX thread only."""

from __future__ import annotations

from mlxcache.cache.ram import RamTier
from mlxcache.cache.shared_ram import Wait


class MemoryWaits:
    """Waits of one model's requests for memory that other models hold, one request at a time.

    `ram`: the RAM tier of the model; the wait is recorded in its `SharedRam`. Without a shared
    budget nothing ever waits.
    """

    def __init__(self, ram: RamTier):
        self._ram = ram

    def fits_alone(self, tokens: int) -> bool:
        """Return whether a prompt of `tokens` tokens would fit if all other models were unloaded.

        That is whether the budget would then have room for its KV and state once this model's idle
        KV is evicted. Models that are never unloaded keep their memory. Call while no request of
        this model is in progress.
        """
        size, shared = self._least_bytes(tokens), self._ram.shared
        if shared is not None:
            return shared.fits_alone(self._ram, size)
        return size <= self._ram.budget.own_free + self._ram.idle_bytes

    def in_reach(self, tokens: int) -> bool:
        """Return whether a prompt of `tokens` tokens fits once all idle KV is evicted.

        That is whether the budget then has room for the prompt's KV and state, without unloading a
        model. Idle KV is that which no request uses, of this model and of others. That of another
        model counts only while all paths of that model are on disk, so that it can be evicted at
        once. Always true without a shared budget, because there is nothing to wait for. Call while
        no request of this model is in progress.
        """
        shared = self._ram.shared
        return shared is None or shared.in_reach(self._ram, self._least_bytes(tokens))

    def _least_bytes(self, tokens: int) -> int:
        positions, layout = (tokens + 1 + 63) // 64 * 64, self._ram.layout
        return positions * layout.bytes_per_token + layout.running_bytes

    def begin(self, tokens: int) -> bool:
        """Record that a prompt of `tokens` tokens waits for memory that other models hold.

        Returns True; `current` is this wait until `end`. Returns False, and records nothing, if no
        other model holds memory that the prompt may get later.
        """
        shared = self._ram.shared
        if shared is None or not shared.waits_for_others(self._ram):
            return False
        shared.wait(self._ram, self._least_bytes(tokens))
        return True

    def retry(self) -> None:
        """Let the waiting prompt try again to reserve memory, even if none has become free.

        Does nothing if no prompt waits.
        """
        if self._ram.shared is not None:
            self._ram.shared.retry(self._ram)

    def end(self) -> None:
        """Record that no prompt of this model waits any more: `current` is None from now on."""
        if self._ram.shared is not None:
            self._ram.shared.stop_waiting(self._ram)

    @property
    def current(self) -> Wait | None:
        """The wait of a prompt for memory of other models, or None if none waits."""
        return self._ram.shared.wait_of(self._ram) if self._ram.shared is not None else None

    @property
    def short(self) -> bool:
        """True if a prompt waits for memory of other models, and is not to try again yet.

        It is to try again after `retry`, and when more memory is free or can be evicted than at
        `begin`.
        """
        return self._ram.shared is not None and self._ram.shared.is_short(self._ram)

    @property
    def others_wait(self) -> bool:
        """True if a request for another model waits for memory."""
        return self._ram.shared is not None and self._ram.shared.others_wait(self._ram)
