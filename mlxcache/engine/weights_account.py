"""Charges of weights to the memory that several models share. MLX thread only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set

from mlxcache.model.base_weights import Bases, BaseUse


class WeightsAccount:
    """Bytes of weights that are charged, each array once.

    `charge(kind, n)` charges `n` bytes to a kind of the shared budget, or releases them if `n` is
    negative. `weights:NAME` is what only the model NAME uses; `weights:BASE (shared)` is what
    several models use of the weights in the folder of BASE.
    """

    def __init__(self, charge: Callable[[str, int], None]):
        self.bases = Bases()
        self._charge = charge
        self._granted: dict[BaseUse, int] = {}
        self._charged: Counter[str] = Counter()

    def grant(self, use: BaseUse, nbytes: int) -> None:
        """Charge the weights of a model, of `nbytes` bytes in total, that are read now or were.

        Bytes of a base that the model holds already are charged with the base.
        """
        self._granted[use] = nbytes
        self.settle()

    def remove(self, use: BaseUse) -> None:
        """Release `use` and charge nothing for its model any more."""
        use.release()
        self._granted.pop(use, None)
        self.settle()

    def settle(self) -> None:
        """Make the charges agree with what the models hold now."""
        due = Counter({f"weights:{name}": n for name, n in self.bases.charges().items()})
        for use, nbytes in self._granted.items():
            due[f"weights:{use.name}"] += max(0, nbytes - use.held_bytes)
        changes = {kind: due[kind] - self._charged[kind] for kind in due.keys() | self._charged}
        for kind, change in sorted(changes.items(), key=lambda item: item[1]):
            if change:
                self._charge(kind, change)
        self._charged = due

    # -- sizes -------------------------------------------------------------------------------------

    def freed_by(self, uses: Set[BaseUse]) -> int:
        """Return the bytes of weights that are free once the models of `uses` are unloaded."""
        own = sum(max(0, self._granted.get(use, 0) - use.held_bytes) for use in uses)
        return own + self.bases.freed_by(uses)


def union_bytes(weights: list[tuple[BaseUse, int]]) -> int:
    """Return the bytes of the weights of several models that are loaded at once.

    `weights`: of each model its use of base arrays, and the size of all its weights.
    """
    parts = {part: n for use, _ in weights for part, n in use.needed.items()}
    own = sum(max(0, nbytes - sum(use.needed.values())) for use, nbytes in weights)
    return own + sum(parts.values())
