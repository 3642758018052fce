"""Namespaces of the parts of a model that is divided among several processes, called ranks."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, get_args

Mode = Literal["tensor", "pipeline"]
"""Division of a model: each layer among all ranks, or the layers one after another."""

_PART = re.compile(rf"(.+)\.({'|'.join(get_args(Mode))})\.(\d{{1,4}})of(\d{{1,4}})")


class PartName(NamedTuple):
    """Namespace of the part of a model's KV that one rank has; `whole`: the model's."""

    whole: str
    mode: Mode
    rank: int
    size: int

    @property
    def namespace(self) -> str:
        return f"{self.whole}.{self.mode}.{self.rank}of{self.size}"


def read_part_name(namespace: str) -> PartName | None:
    match = _PART.fullmatch(namespace)
    if match is None:
        return None
    mode: Mode = "tensor" if match[2] == "tensor" else "pipeline"
    return PartName(match[1], mode, int(match[3]), int(match[4]))


def other_parts(namespace: str) -> list[str]:
    part = read_part_name(namespace)
    if part is None:
        return []
    return [part._replace(rank=rank).namespace for rank in range(part.size) if rank != part.rank]
