"""The weights of a loaded model, which can be dropped from memory and read back later."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_map

from mlxcache.errors import ModelError
from mlxcache.model import device
from mlxcache.model.base_weights import Bases, BaseUse, Stamp, file_stamps
from mlxcache.model.load import Loaded, ModelSpec, load_again

SLICE_S = 0.25
"""Seconds of reading between two chances for other models to compute, if no array takes longer."""

MIN_SLICE, MAX_SLICE = 16 << 20, 512 << 20
"""Bytes of weights that are read at once: the first time, and the most."""


class Weights:
    """Weights of one loaded model, in memory or only on disk. MLX thread only.

    `spec` and `use` must be those with which `loaded` was made. `use`: the arrays that this model
    uses in common with other models; without it, no arrays are shared. `nbytes`: bytes of all
    weights. `resident`: True if they are in memory, so that the model can run; as an argument, it
    must be False if `loaded` was made with `lazy`.
    """

    def __init__(
        self, loaded: Loaded, spec: ModelSpec, use: BaseUse | None = None, *, resident: bool = True
    ):
        self.resident = resident
        self._dropped = False
        self.use = use or BaseUse(Bases(), loaded.info.id)
        self._loaded, self._spec = loaded, spec
        arrays = tree_flatten(loaded.model.parameters())
        self.nbytes: int = _count_bytes(array for _, array in arrays)
        self._shapes = {name: (array.shape, array.dtype) for name, array in arrays}
        self._stamps = self._read_stamps()
        self.use.keep(loaded.model)

    def drop(self) -> None:
        """Release the weights. The model cannot run until `read` has put them back.

        Arrays that other models use stay in memory.
        """
        model = self._loaded.model
        model.update(tree_map(lambda _: mx.array([]), model.parameters()))
        self.use.release()
        self.resident, self._dropped = False, True
        mx.clear_cache()

    def read(self, pace: Pace | None = None) -> Iterator[int]:
        """Read the weights from disk into the model, in parts.

        Yields after each part the total bytes of weights so far. Arrays that other models have in
        memory are not read again, but count. `pace` decides the size of each part. The model can
        run once the iteration has ended. Raises ModelError, and the model cannot run, if the files
        cannot be read, or have changed since the model was loaded: KV that was computed before
        would not belong to the new weights.
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
        """Return why weights that were dropped cannot be read again, or None if they can.

        The text names a file, but not its folder. Reads the state of the files; any thread.
        """
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
        """Return the model's parameters by name, each of which is read when it is evaluated.

        Raises ModelError if the files cannot be read, or have changed since the model was loaded.
        """
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
        """Return a stamp of each file that decides the weights, to notice if one has changed.

        A stamp is the path, the size in bytes, and the time of the last change in ns.
        """
        folders = [self._loaded.path, self._loaded.draft, self._spec.adapter]
        paths = [Path(folder).expanduser() for folder in folders if folder is not None]
        return [stamp for path in paths for stamp in file_stamps(path)]


def _count_bytes(arrays: Iterable[mx.array]) -> int:
    """Return the bytes of `arrays`, counting one that occurs several times once."""
    return sum({id(array): array.nbytes for array in arrays}.values())


def is_resident(model: nn.Module) -> bool:
    """Return False if `Weights.drop` has dropped the weights of `model`, else True.

    True also for weights of a lazily loaded model that have not been read yet.
    """
    return all(array.size for _, array in tree_flatten(model.parameters()))


class Pace:
    """Size of the parts in which weights are read, so that each takes about 0.25 s (`SLICE_S`).

    `nbytes`: bytes of the next part. `least`, `most`: the bounds of `nbytes`, which begins at
    `least`.
    """

    def __init__(self, least: int = MIN_SLICE, most: int = MAX_SLICE):
        self.nbytes, self._least, self._most = least, least, most

    def note(self, nbytes: int, seconds: float) -> None:
        """Adapt the size of the next part to the last one: `nbytes` bytes took `seconds`."""
        fitting = int(nbytes * SLICE_S / max(seconds, 1e-6))
        self.nbytes = min(self._most, max(self._least, fitting))


def split(arrays: list[mx.array], pace: Pace) -> Iterator[list[mx.array]]:
    """Divide arrays into consecutive parts of at least `pace.nbytes` bytes each.

    `pace.nbytes` may change from part to part. The last part may be smaller. Yields nothing if
    `arrays` is empty.
    """
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
