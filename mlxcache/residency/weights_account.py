"""Accounting of weights: which bytes are charged to the shared budget. MLX thread only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set

from mlxcache.model.weights import Bases, BaseUse


class WeightsAccount:
    """Charges for the weights of several models; an array that several models use counts once.

    `charge(kind, n)` charges `n` bytes to a kind of the shared budget, or releases them if `n` is
    negative. The kind `weights:NAME` is for arrays that only the model NAME uses, `weights:BASE
    (shared)` for those of the base model BASE that several models use.
    """

    def __init__(self, charge: Callable[[str, int], None]):
        self.bases = Bases()
        self._charge = charge
        self._granted: dict[BaseUse, int] = {}
        self._charged: Counter[str] = Counter()

    def grant(self, use: BaseUse, nbytes: int) -> None:
        """Charge the weights of a model, before or after they are read.

        `use`: the model's use of arrays of base models. `nbytes`: bytes of all its weights. Arrays
        that it holds together with other models are charged once, as those of their base.
        """
        self._granted[use] = nbytes
        self.settle()

    def remove(self, use: BaseUse) -> None:
        """Release the arrays that `use` holds, and charge nothing for its model any more."""
        use.release()
        self._granted.pop(use, None)
        self.settle()

    def settle(self) -> None:
        """Update the charges to the arrays that the models hold now."""
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
        """Return the bytes of weights that unloading the models of `uses` would free."""
        own = sum(max(0, self._granted.get(use, 0) - use.held_bytes) for use in uses)
        return own + self.bases.freed_by(uses)


def union_bytes(weights: list[tuple[BaseUse, int]]) -> int:
    """Return the bytes of the weights of several models that are loaded at once."""
    parts = {part: n for use, _ in weights for part, n in use.needed.items()}
    own = sum(max(0, nbytes - sum(use.needed.values())) for use, nbytes in weights)
    return own + sum(parts.values())
