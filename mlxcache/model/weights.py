"""The weights of loaded models: in memory or only on disk, and shared between models.

A base model and the adapters over it use the same arrays. MLX thread only, except where stated.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxcache.config.models import model_id
from mlxcache.errors import ModelError
from mlxcache.model import device
from mlxcache.model.folder import Stamp, file_stamps
from mlxcache.model.load import Loaded, ModelSpec, load_again

SLICE_S = 0.25  # of reading between two chances for other models to compute
MIN_SLICE, MAX_SLICE = 16 << 20, 512 << 20  # bytes that are read at once: first, and at most

_CHOSEN = ("top_k", "num_experts_per_tok")  # where mlx-lm's layers hold the experts per token

_MOST_GATHERED = 32_768
"""Rows, one for each token and expert, above which MLX may compute quantised experts wrongly.

Source: https://github.com/ml-explore/mlx/issues/3856
"""

_UNKNOWN_CHOSEN = 32  # experts per token if their number is unknown; models have at most 22


# -- arrays that several models use ----------------------------------------------------------------


class Base:
    """The arrays in memory of one folder's files; each is released with its last user."""

    def __init__(self, name: str):
        self.name = name
        self._arrays: dict[str, mx.array] = {}
        self._users: dict[str, frozenset[BaseUse]] = {}
        self._bytes: Mapping[frozenset[BaseUse], int] | None = None

    def get(self, name: str) -> mx.array | None:
        return self._arrays.get(name)

    def names(self) -> list[str]:
        return list(self._arrays)

    def hold(self, name: str, array: mx.array, user: BaseUse) -> None:
        """Record `user` as a user of `array`, which must be `get(name)` unless that is None."""
        self._arrays[name] = array
        self._users[name] = self._users.get(name, frozenset()) | {user}
        self._bytes = None

    def release(self, name: str, user: BaseUse) -> None:
        users = self._users[name] - {user}
        self._bytes = None
        if users:
            self._users[name] = users
        else:
            del self._users[name], self._arrays[name]

    def has_others(self, name: str, user: BaseUse) -> bool:
        users = self._users.get(name, frozenset())
        return len(users) > (user in users)

    def bytes_by_users(self) -> Mapping[frozenset[BaseUse], int]:
        if self._bytes is None:
            found: Counter[frozenset[BaseUse]] = Counter()
            for name, users in self._users.items():
                found[users] += self._arrays[name].nbytes
            self._bytes = found
        return self._bytes


class Bases:
    """All base models with arrays in memory; a folder whose files have changed is another base.

    `version` increases whenever the arrays that any model holds change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._bases: WeakValueDictionary[tuple[Stamp, ...], Base] = WeakValueDictionary()

    def note_change(self) -> None:
        self.version += 1

    def find(self, folder: Path) -> Base:
        """Return the base for the files that are in `folder` now, a new one if none is known."""
        stamps = file_stamps(folder.resolve())
        base = self._bases.get(stamps)
        if base is None:
            base = self._bases[stamps] = Base(model_id(str(folder)))
        return base

    def charges(self) -> dict[str, int]:
        """Return the bytes of all arrays by their user's name, or "BASE (shared)" for several."""
        charges: Counter[str] = Counter()
        for base, users, nbytes in self._groups():
            shared = f"{base.name} (shared)"
            charges[shared if len(users) > 1 else next(iter(users)).name] += nbytes
        return dict(charges)

    def freed_by(self, uses: Set[BaseUse]) -> int:
        return sum(nbytes for _, users, nbytes in self._groups() if users <= uses)

    def _groups(self) -> Iterator[tuple[Base, frozenset[BaseUse], int]]:
        for base in list(self._bases.values()):
            for users, nbytes in base.bytes_by_users().items():
                yield base, users, nbytes


class BaseUse:
    """One model's use of the arrays of base models, some of which it holds in memory.

    `needed`: bytes of the arrays that the model needs, by base and name; any thread may read it.
    `held_bytes`: bytes of those that it holds, all of them while the model is loaded.
    """

    def __init__(self, bases: Bases, name: str):
        self.name = name
        self.held_bytes = 0
        self.needed: Mapping[tuple[Base, str], int] = {}
        self._bases = bases
        self._held: Mapping[tuple[Base, str], int] = {}

    def find(self, folders: Iterable[Path]) -> None:
        """Assume, before the first load, that the model needs all arrays in memory of `folders`."""
        found = [self._bases.find(folder) for folder in folders]
        self.needed = {
            (base, name): array.nbytes
            for base in found
            for name in base.names()
            if (array := base.get(name)) is not None
        }

    def claim(self) -> None:
        """Hold the needed arrays that are in memory, so that they are not released."""
        held = dict(self._held)
        for (base, name), nbytes in self.needed.items():
            array = base.get(name)
            if array is not None:
                base.hold(name, array, self)
                held[base, name] = nbytes
        self._set_held(held)

    def share(self, folder: Path, model: nn.Module) -> None:
        """Replace arrays of `model` by the equal ones of the base in `folder` that are in memory.

        `model` was built lazily from that folder, without an adapter. All of its arrays are held,
        for models loaded later, except one of another shape or dtype than the base's.
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
        self.needed = held
        self._set_held(held)

    def release(self) -> None:
        for base, name in self._held:
            base.release(name, self)
        self._set_held({})

    def _set_held(self, held: Mapping[tuple[Base, str], int]) -> None:
        self._held = held
        self.held_bytes = sum(held.values())
        self._bases.note_change()

    @property
    def shared_bytes(self) -> int:
        """Bytes of the needed arrays that other models hold too. Any thread."""
        return sum(n for (base, name), n in self.needed.items() if base.has_others(name, self))


# -- weights that are dropped and read back --------------------------------------------------------


class Weights:
    """Weights of one loaded model, in memory or only on disk.

    `spec` and `use` must be those with which `loaded` was made. `resident`: the weights are in
    memory, so that the model can run; False if `loaded` was made with `lazy`.
    """

    def __init__(
        self, loaded: Loaded, spec: ModelSpec, use: BaseUse | None = None, *, resident: bool = True
    ):
        self.resident = resident
        self._dropped = False
        self.use = use or BaseUse(Bases(), loaded.info.id)
        self._loaded, self._spec = loaded, spec
        arrays = tree_flatten(loaded.model.parameters())
        # an array that occurs several times counts once
        self.nbytes = sum({id(array): int(array.nbytes) for _, array in arrays}.values())
        self._shapes = {name: (array.shape, array.dtype) for name, array in arrays}
        self._stamps = self._read_stamps()
        self.use.keep(loaded.model)

    def drop(self) -> None:
        """Release the weights. The model cannot run until `read` has put them back."""
        model = self._loaded.model
        model.update(tree_map(lambda _: mx.array([]), model.parameters()))
        self.use.release()
        self.resident, self._dropped = False, True
        mx.clear_cache()

    def read(self, pace: Pace | None = None) -> Iterator[int]:
        """Read the weights from disk into the model, in parts; yield the bytes so far after each.

        Arrays that other models have in memory are not read again, but count. Raises ModelError if
        the files cannot be read, or have changed since the model was loaded: KV that was computed
        before would not belong to the new weights.
        """
        pace, done = pace or Pace(), 0
        try:
            model = self._loaded.model
            parameters = self._open() if self._dropped else model.parameters()
            for part in split([array for _, array in tree_flatten(parameters)], pace):
                began = time.perf_counter()
                self._evaluate(part)
                size = sum(array.nbytes for array in part)
                pace.note(size, time.perf_counter() - began)
                done += size
                yield done
        except BaseException:
            self.use.release()
            raise
        model.update(parameters)
        self.resident, self._dropped = True, False

    def find_obstacle(self) -> str | None:
        """Return why weights that were dropped cannot be read again, or None. Any thread."""
        changed = set(self._stamps).symmetric_difference(self._read_stamps())
        if self.resident or not changed:
            return None
        file = Path(min(changed)[0])
        gone = not os.access(file, os.R_OK)
        what = "cannot be read any more" if gone else "has changed since the model was loaded"
        remedy = "" if gone else ", or start the server again to use the new one"
        return (
            f"The file {file.name} of the model {self._loaded.info.id} {what}: put back the file "
            f"as it was{remedy}."
        )

    def _open(self) -> dict[str, Any]:
        if (obstacle := self.find_obstacle()) is not None:
            raise ModelError(obstacle)
        again = load_again(self._loaded, self._spec, self.use)
        parameters: dict[str, Any] = again.parameters()
        arrays = tree_flatten(parameters)
        if {name: (array.shape, array.dtype) for name, array in arrays} != self._shapes:
            raise ModelError(f"The model in {self._loaded.path} has other weights than before.")
        self.use.keep(again)
        return parameters

    def _evaluate(self, part: list[mx.array]) -> None:
        try:
            # the state refers to the initial values of all layers made since it was evaluated
            mx.eval(part, mx.random.state)
        except RuntimeError as error:
            if device.is_device_error(error):
                raise
            raise ModelError(
                f"The weights in {self._loaded.path} cannot be read: {error}"
            ) from error

    def _read_stamps(self) -> list[Stamp]:
        folders = [self._loaded.path, self._loaded.draft, self._spec.adapter]
        paths = [Path(folder).expanduser() for folder in folders if folder is not None]
        return [stamp for path in paths for stamp in file_stamps(path)]


def is_resident(model: nn.Module) -> bool:
    """Return False if `Weights.drop` has dropped the weights of `model`, else True."""
    return all(array.size for _, array in tree_flatten(model.parameters()))


class Pace:
    """Size of the parts in which weights are read, so that each takes about `SLICE_S`."""

    def __init__(self, least: int = MIN_SLICE, most: int = MAX_SLICE):
        self.nbytes, self._least, self._most = least, least, most

    def note(self, nbytes: int, seconds: float) -> None:
        fitting = int(nbytes * SLICE_S / max(seconds, 1e-6))
        self.nbytes = min(self._most, max(self._least, fitting))


def split(arrays: list[mx.array], pace: Pace) -> Iterator[list[mx.array]]:
    """Divide arrays into consecutive parts of at least `pace.nbytes` bytes each, but the last."""
    part: list[mx.array] = []
    size = 0
    for array in arrays:
        part.append(array)
        size += array.nbytes
        if size >= pace.nbytes:
            yield part
            part, size = [], 0
    if part:
        yield part


# -- what follows from the weights -----------------------------------------------------------------


def longest_pass(model: nn.Module) -> int:
    """Return the most tokens of a pass in which quantised experts are right, 0 for no limit."""
    modules = [module for _, module in model.named_modules()]
    if not any(isinstance(module, QuantizedSwitchLinear) for module in modules):
        return 0
    return _MOST_GATHERED // (max(map(_chosen, modules)) or _UNKNOWN_CHOSEN)


def shared_bytes(model: nn.Module) -> int:
    """Estimate the bytes of weights that a step of a batch reads once for all of its rows.

    If each token uses k of a layer's n experts, evenly, two tokens share k * k / n of them, so the
    bytes of that many count. Of an embedding only single rows are read, unless it also computes the
    logits.
    """
    modules = dict(model.named_modules())
    tied = not any(name.endswith("lm_head") for name in modules)
    chosen = max((k for module in modules.values() if (k := _chosen(module))), default=0)
    total = _bytes_of(model)
    for module in modules.values():
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
            share = min(1.0, chosen / module.num_experts) ** 2
            total -= int((1 - share) * _bytes_of(module))
        elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding) and not tied:
            total -= _bytes_of(module)
    return total


def _chosen(module: Any) -> int:
    found = (getattr(module, name, None) for name in _CHOSEN)
    return next((k for k in found if type(k) is int), 0)


def _bytes_of(module: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))
