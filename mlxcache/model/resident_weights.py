"""The weights of a loaded model, which can be dropped from memory and read back later."""

from __future__ import annotations

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

SLICE_BYTES = 512 << 20
"""Bytes of weights that are read at once, between two chances for other models to compute."""


class Weights:
    """Weights of one loaded model, in memory or only on disk. MLX thread only.

    `spec` and `use` must be those with which `loaded` was made; without `use`, no other model
    shares arrays with this one. `nbytes`: the size of all weights. `resident`: they are in memory,
    so the model can run.
    """

    def __init__(self, loaded: Loaded, spec: ModelSpec, use: BaseUse | None = None):
        self.resident = True
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
        self.resident = False
        mx.clear_cache()

    def read(self, slice_bytes: int = SLICE_BYTES) -> Iterator[int]:
        """Read the weights from disk into the model; yield the total bytes read after each part.

        Arrays that other models have in memory are used as they are. A part has at least
        `slice_bytes` bytes. The weights are in use after the last item. Raises ModelError if the
        files cannot be read or have changed since the model was loaded, because the KV in the cache
        belongs to the former weights; the weights stay dropped then.
        """
        try:
            parameters = self._open()
            arrays = [array for _, array in tree_flatten(parameters)]
            done = 0
            for part in split(arrays, slice_bytes):
                self._evaluate(part)
                done += sum(array.nbytes for array in part)
                yield done
        except BaseException:
            self.use.release()
            raise
        self._loaded.model.update(parameters)
        self.resident = True

    def _open(self) -> dict[str, Any]:
        """Return the parameters of the model, each of which is read when it is evaluated.

        Raises ModelError if they are others than before, or cannot be read.
        """
        if self._read_stamps() != self._stamps:
            raise ModelError(
                f"The files of the model in {self._loaded.path} have changed since it was loaded: "
                "start the server again."
            )
        again = load_again(self._loaded, self._spec, self.use)
        parameters: dict[str, Any] = again.parameters()
        arrays = tree_flatten(parameters)
        if {name: (array.shape, array.dtype) for name, array in arrays} != self._shapes:
            raise ModelError(f"The model in {self._loaded.path} has other weights than before.")
        self.use.keep(again)
        return parameters

    def _evaluate(self, part: list[mx.array]) -> None:
        try:
            mx.eval(part)
        except RuntimeError as error:
            if device.is_device_error(error):
                raise
            raise ModelError(
                f"The weights in {self._loaded.path} cannot be read: {error}"
            ) from error

    def _read_stamps(self) -> list[Stamp]:
        """Return a stamp of each file that decides about the content of the weights."""
        folders = [self._loaded.path, self._loaded.draft, self._spec.adapter]
        paths = [Path(folder).expanduser() for folder in folders if folder is not None]
        return [stamp for path in paths for stamp in file_stamps(path)]


def _count_bytes(arrays: Iterable[mx.array]) -> int:
    """Return the bytes of `arrays`, counting one that occurs several times once."""
    return sum({id(array): array.nbytes for array in arrays}.values())


def is_resident(model: nn.Module) -> bool:
    """Return whether the weights of `model` are in memory, and not dropped by `Weights.drop`."""
    return all(array.size for _, array in tree_flatten(model.parameters()))


def split(arrays: list[mx.array], slice_bytes: int) -> Iterator[list[mx.array]]:
    """Divide arrays into consecutive parts of at least `slice_bytes` bytes; the last may be less.

    No arrays give no part.
    """
    part: list[mx.array] = []
    size = 0
    for array in arrays:
        part.append(array)
        size += array.nbytes
        if size >= slice_bytes:
            yield part
            part, size = [], 0
    if part:
        yield part
