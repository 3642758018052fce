"""Arrays of base models in memory, which a base and the adapters over it use together.

MLX thread only, except where stated.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from weakref import WeakValueDictionary

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map_with_path

from mlxcache.config.models import model_id

FILES = (
    "config.json",
    "hf_quant_config.json",
    "adapter_config.json",
    "*.py",
    "*.safetensors",
)
"""Files of a folder that decide about the content of the weights."""

Stamp = tuple[str, int, int]
"""Path of a file, its size in bytes, and the time of its last change in nanoseconds."""


def file_stamps(folder: Path) -> tuple[Stamp, ...]:
    """Return a stamp of each file in `folder` that the content of the weights depends on.

    A stamp is the path, the size in bytes, and the time of the last change in ns. A broken link,
    and a file that must not be read, have a size of -1.
    """
    return tuple(_stamp(file) for name in FILES for file in sorted(folder.glob(name)))


def _stamp(file: Path) -> Stamp:
    try:
        stat = file.stat()
    except OSError:
        return str(file), -1, 0
    if not os.access(file, os.R_OK):
        return str(file), -1, stat.st_mtime_ns
    return str(file), stat.st_size, stat.st_mtime_ns


class Base:
    """The arrays in memory that were read from the files of one folder.

    `name`: the model's id. Models use the arrays; each array is released with its last user.
    """

    def __init__(self, name: str):
        self.name = name
        self._arrays: dict[str, mx.array] = {}
        self._users: dict[str, frozenset[BaseUse]] = {}
        self._bytes: Mapping[frozenset[BaseUse], int] | None = None

    def get(self, name: str) -> mx.array | None:
        """Return the array `name`, or None if no model uses it."""
        return self._arrays.get(name)

    def names(self) -> list[str]:
        """Return the names of all arrays in use."""
        return list(self._arrays)

    def hold(self, name: str, array: mx.array, user: BaseUse) -> None:
        """Record `user` as a user of the array `name`, so that the array stays in memory.

        `array`: the array itself, which must be the result of `get(name)` unless that is
        None.
        """
        self._arrays[name] = array
        self._users[name] = self._users.get(name, frozenset()) | {user}
        self._bytes = None

    def release(self, name: str, user: BaseUse) -> None:
        """Record that `user` does not use the array `name` any more."""
        users = self._users[name] - {user}
        self._bytes = None
        if users:
            self._users[name] = users
        else:
            del self._users[name], self._arrays[name]

    def has_others(self, name: str, user: BaseUse) -> bool:
        """Return whether a model other than `user` uses the array `name`. Any thread."""
        users = self._users.get(name, frozenset())
        return len(users) > (user in users)

    def bytes_by_users(self) -> Mapping[frozenset[BaseUse], int]:
        """Return the bytes of the arrays in memory by the set of their users."""
        if self._bytes is None:
            found: Counter[frozenset[BaseUse]] = Counter()
            for name, users in self._users.items():
                found[users] += self._arrays[name].nbytes
            self._bytes = found
        return self._bytes


class Bases:
    """All base models with arrays in memory, identified by their files.

    A folder whose files have changed is another base; models that were loaded before keep the
    arrays of the former one. `version`: a number that increases whenever the arrays that any model
    holds change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._bases: WeakValueDictionary[tuple[Stamp, ...], Base] = WeakValueDictionary()

    def note_change(self) -> None:
        """Increase `version`, because the arrays that a model holds have changed."""
        self.version += 1

    def find(self, folder: Path) -> Base:
        """Return the base for the files that are in `folder` now, a new one if none is known."""
        stamps = file_stamps(folder.resolve())
        base = self._bases.get(stamps)
        if base is None:
            base = self._bases[stamps] = Base(model_id(str(folder)))
        return base

    def charges(self) -> dict[str, int]:
        """Return the bytes of all arrays in memory, by the name to charge them to.

        An array with one user is charged to that user's name, an array with several to the
        name of its base followed by " (shared)".
        """
        charges: Counter[str] = Counter()
        for base, users, nbytes in self._groups():
            shared = f"{base.name} (shared)"
            charges[shared if len(users) > 1 else next(iter(users)).name] += nbytes
        return dict(charges)

    def freed_by(self, uses: Set[BaseUse]) -> int:
        """Return the bytes that are freed if all of `uses` release their arrays."""
        return sum(nbytes for _, users, nbytes in self._groups() if users <= uses)

    def _groups(self) -> Iterator[tuple[Base, frozenset[BaseUse], int]]:
        for base in list(self._bases.values()):
            for users, nbytes in base.bytes_by_users().items():
                yield base, users, nbytes


class BaseUse:
    """One model's use of the arrays of base models.

    It needs some arrays, and holds those of them that it keeps in memory. `name`: the model's name.
    `held_bytes`: bytes of the arrays that it holds; while the model is loaded, it holds all that it
    needs.
    """

    def __init__(self, bases: Bases, name: str):
        self.name = name
        self.held_bytes = 0
        self._bases = bases
        self._needed: Mapping[tuple[Base, str], int] = {}
        self._held: Mapping[tuple[Base, str], int] = {}

    # -- holding -----------------------------------------------------------------------------------

    def find(self, folders: Iterable[Path]) -> None:
        """Assume that the model needs all arrays in memory of the bases in `folders`.

        Call before the model is loaded for the first time.
        """
        found = [self._bases.find(folder) for folder in folders]
        self._needed = {
            (base, name): array.nbytes
            for base in found
            for name in base.names()
            if (array := base.get(name)) is not None
        }

    def claim(self) -> None:
        """Hold the needed arrays that are in memory, so that they are not released."""
        held = dict(self._held)
        for (base, name), nbytes in self._needed.items():
            array = base.get(name)
            if array is not None:
                base.hold(name, array, self)
                held[base, name] = nbytes
        self._set_held(held)

    def share(self, folder: Path, model: nn.Module) -> None:
        """Replace arrays of `model` by the equal ones of the base in `folder` that are in memory.

        `model` was built lazily from that folder, without an adapter. All of its arrays are
        held, so that models loaded later can use them, except one whose shape or dtype
        differs from that of the base's array with the same name: it stays as it is.
        """
        base, held = self._bases.find(folder), dict(self._held)

        def choose(name: str, array: mx.array) -> mx.array:
            present = base.get(name)
            if present is None:
                present = array
            elif (present.shape, present.dtype) != (array.shape, array.dtype):
                return array
            base.hold(name, present, self)
            held[base, name] = present.nbytes
            return present

        model.update(tree_map_with_path(choose, model.parameters()))
        self._set_held(held)

    def keep(self, model: nn.Module) -> None:
        """Release held arrays that are not parameters of `model`; the others become `needed`."""
        used = {id(array) for _, array in tree_flatten(model.parameters())}
        held = {part: n for part, n in self._held.items() if id(part[0].get(part[1])) in used}
        for base, name in self._held.keys() - held.keys():
            base.release(name, self)
        self._needed = held
        self._set_held(held)

    def release(self) -> None:
        """Release all arrays. Those without another user are freed."""
        for base, name in self._held:
            base.release(name, self)
        self._set_held({})

    def _set_held(self, held: Mapping[tuple[Base, str], int]) -> None:
        self._held = held
        self.held_bytes = sum(held.values())
        self._bases.note_change()

    # -- sizes, from any thread --------------------------------------------------------------------

    @property
    def needed(self) -> Mapping[tuple[Base, str], int]:
        """Sizes in bytes of the arrays that the model needs, by base and name."""
        return self._needed

    @property
    def shared_bytes(self) -> int:
        """Bytes of the needed arrays that other models hold too."""
        return sum(n for (base, name), n in self._needed.items() if base.has_others(name, self))
