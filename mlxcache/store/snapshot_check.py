"""Whether a file is what it claims to be: every size is checked before memory is taken for it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

import numpy as np

from mlxcache.errors import SnapshotRefused
from mlxcache.store.digests import BLOCK
from mlxcache.store.safetensors import Header, Malformed, Place, read_foreign_header
from mlxcache.store.snapshot_info import (
    CHECKSUMS,
    FORMAT,
    MOST_STATE_BYTES,
    TOKENS,
    VERSION,
    Description,
    Spec,
    state_name,
)
from mlxcache.types import Tokens

_MOST_ROW = 16 << 20  # bytes of one token's KV
_KV = re.compile(r"kv\.(0|[1-9][0-9]{0,4})\.[0-9]")


def format_of(path: Path) -> Literal["mlxcache", "mlx-lm"]:
    """Whose file it is, by its header. Raises SnapshotRefused where it is nobody's."""
    try:
        fd = os.open(path, os.O_RDONLY)
        try:
            metadata = read_foreign_header(fd, own=False).metadata
        finally:
            os.close(fd)
    except (Malformed, OSError) as error:
        raise SnapshotRefused(f"This is not a whole snapshot: {error}.") from error
    if metadata.get("format") == FORMAT:
        return "mlxcache"
    if "1.0" in metadata:  # the class of the first layer's cache
        return "mlx-lm"
    raise SnapshotRefused("This is neither a snapshot nor a prompt cache of mlx-lm.")


def bounded_header(fd: int) -> Header:
    """The header of the open file `fd`, its checksum checked. Raises SnapshotRefused, OSError."""
    try:
        return read_foreign_header(fd, own=True)
    except Malformed as error:
        raise SnapshotRefused(f"This is not a whole snapshot: {error}.") from error


def description_of(header: Header) -> Description:
    """What the file says of its session. Raises SnapshotRefused."""
    if header.metadata.get("format") != FORMAT:
        raise SnapshotRefused("This is not a snapshot of mlxcache.")
    version = header.metadata.get("version")
    if version != str(VERSION):
        raise SnapshotRefused(
            f"The snapshot has version {version} of the format, and this mlxcache reads {VERSION}."
        )
    return Description.decode(header.metadata.get("description", ""))


def check_model(description: Description, namespace: str | None, model: str | None) -> None:
    """Raises SnapshotRefused where the snapshot is of another model than that of `namespace`."""
    if namespace is None or description.namespace == namespace:
        return
    here = f"{model} ({namespace[:8]})" if model else namespace[:8]
    raise SnapshotRefused(
        f"The snapshot was made with the model {description.model} ({description.namespace[:8]}), "
        f"and the one here is {here}. The digests stand for weights, configuration, adapter, "
        "KV's dtype and mlx-lm's version: KV is of use only where all of these are the same.",
        code="wrong_model",
    )


def tensors_of(
    header: Header, description: Description
) -> tuple[tuple[Place, ...], tuple[tuple[Place, ...], ...]]:
    """The KV's tensors in order, and those of each checkpoint.

    Raises SnapshotRefused unless they, the tokens and the checksums are all there is, and of the
    shapes that the description asks for.
    """
    places = {place.name: place for place in header.places}
    rows = sum(leaf.rows for leaf in description.leaves)
    _check(places.pop(TOKENS, None), "I32", sum(leaf.tokens for leaf in description.leaves))
    blocks = sum(-(-leaf.rows // BLOCK) for leaf in description.leaves)
    _check(places.pop(CHECKSUMS, None), "U64", blocks + len(description.checkpoints) + 1)
    states: list[list[Place]] = [[] for _ in description.checkpoints]
    kv = []
    for name, place in places.items():
        index = _state_index(name, len(states))
        if index is not None:
            states[index].append(place)
        elif _KV.fullmatch(name) and len(place.shape) > 1 and place.shape[0] == rows > 0:
            kv.append(place)
        else:
            raise SnapshotRefused(f"The snapshot holds a tensor {name[:40]!r} that has no place.")
    if not all(0 < sum(p.nbytes for p in state) <= MOST_STATE_BYTES for state in states):
        raise SnapshotRefused("A checkpoint of the snapshot is empty or too large.")
    if bool(kv) != bool(rows) or sum(p.nbytes // rows for p in kv) > _MOST_ROW:
        raise SnapshotRefused("The snapshot's KV contradicts its description.")
    return tuple(kv), tuple(tuple(state) for state in states)


def _check(place: Place | None, dtype: str, length: int) -> None:
    if place is None or place.dtype != dtype or place.shape != (length,):
        raise SnapshotRefused("The snapshot's tokens or checksums contradict its description.")


def _state_index(name: str, count: int) -> int | None:
    """The checkpoint that a tensor of this name belongs to."""
    _, _, rest = name.partition(".")
    digits, _, _ = rest.partition(".")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 6):
        return None
    index = int(digits)
    return index if index < count and name.startswith(state_name(index, "")) else None


def check_spec(kv: tuple[Place, ...], spec: Spec | None) -> None:
    """Raises SnapshotRefused where the KV is not of the shapes that the model caches."""
    if spec is None or not kv:
        return
    if {place.name: (place.dtype, place.shape[1:]) for place in kv} != dict(spec):
        raise SnapshotRefused("The snapshot's KV is not of the shapes that this model caches.")


def leaf_ids(raw: memoryview, description: Description, vocab_size: int | None) -> list[Tokens]:
    """Each leaf's token ids from 0. Raises SnapshotRefused for ids that no model has.

    Those less than 0 stand for images; no model is ever fed them.
    """
    own = np.frombuffer(raw, "<i4")
    if vocab_size and own.max(initial=0) >= vocab_size:
        raise SnapshotRefused("The snapshot holds token ids that the model does not know.")
    found: list[Tokens] = []
    at = 0
    for leaf in description.leaves:
        head = found[leaf.parent][: leaf.start] if leaf.parent is not None else own[:0]
        ids = np.concatenate([head, own[at : at + leaf.tokens]]).astype(np.int32)
        at += leaf.tokens
        found.append(ids)
    return found
