"""The classes that compute with a model and hold its KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlxcache.cache.kv_io import KVFiles
from mlxcache.model.kv import Layout
from mlxcache.model.lineage import Lineage, NewLineage
from mlxcache.scheduling.decoder import Decode, Decoder
from mlxcache.scheduling.wall import Wall


@dataclass(frozen=True, slots=True)
class Parts:
    """What makes the objects that operate on a model and its KV.

    A model that is divided among several ranks has other ones, in `ranks.mirrored`.
    """

    lineage: NewLineage = Lineage
    files: Callable[[Layout], KVFiles] = KVFiles
    decode: Decode = Decoder.of_lineage
    wall: Callable[[], Wall] = Wall


WHOLE = Parts()  # the parts of a model that this process has as a whole
