"""Content of the objects of runs and checkpoints: made from the store's files, and verified.

The object of a run has the format of a run file of the store, and holds the KV of one cell or tail.
The object of a checkpoint is the checkpoint's file. See docs/disk-format.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxcache.common_prefix import common_length
from mlxcache.errors import Corrupt
from mlxcache.safetensors import Malformed, Place, Tensor, header_of
from mlxcache.store.digests import BLOCK, Chain
from mlxcache.store.found import Found, Saved
from mlxcache.store.kv_files import (
    block_checksums,
    checkpoint_of,
    checksum_of,
    compose_run,
    is_finite,
    open_file,
    read_range,
    read_run,
    run_of,
)
from mlxcache.store.store import Store
from mlxcache.types import Tokens


@dataclass(frozen=True, slots=True)
class FetchedRun:
    """The verified KV of a prompt's tokens [start, stop) from the remote, to be saved on disk."""

    start: int
    stop: int
    tensors: Sequence[Tensor]


def pack_run(store: Store, found: Found, chain: Chain, start: int, stop: int) -> bytes:
    """Return the content of the object of a run, made from the files in `found`."""
    places: tuple[Place, ...] = ()
    buffers: dict[str, bytearray] = {}
    for piece in found.pieces:
        first, last = max(piece.start, start), min(piece.end, stop)
        if first >= last:
            continue
        store.verify(piece, chain.ids)
        with open_file(piece.path) as fd:
            try:
                head = read_run(fd)
            except Malformed as error:
                raise Corrupt(f"{piece.path.name} is damaged: {error}.") from error
            places = head.places
            for place in places:
                row = place.nbytes // len(head.tokens)
                at = place.offset + (first - head.start) * row
                whole = buffers.setdefault(place.name, bytearray((stop - start) * row))
                part = memoryview(whole)[(first - start) * row : (last - start) * row]
                read_range(fd, at, part)
    tensors = [
        Tensor(
            place.name,
            place.dtype,
            (stop - start, *place.shape[1:]),
            memoryview(buffers[place.name]),
        )
        for place in places
    ]
    header = compose_run(chain, start, stop, tensors)
    return b"".join([header, *(tensor.bytes for tensor in tensors)])


def unpack_run(data: bytes, chain: Chain, start: int, end: int) -> FetchedRun:
    """Verify the object of a run, and return the part of it that the prompt of `chain` can use.

    It must hold the tokens [start, end), and may hold more; those are included as far as they equal
    the prompt's. Raises Malformed if it is damaged or holds other tokens.
    """
    head = run_of(header_of(data))
    if head.namespace != chain.namespace or head.base != chain.whole[start // BLOCK]:
        raise Malformed("it belongs to another prefix")
    count = len(head.tokens)
    shared = common_length(head.tokens, chain.ids[start:])
    if head.start != start or start + shared < end:
        raise Malformed("it holds other tokens")
    view = memoryview(data)
    tensors = [_tensor(view, place) for place in head.places]
    for tensor in tensors:
        if not tensor.shape or tensor.shape[0] != count:
            raise Malformed(f"tensor {tensor.name!r} does not have one row per token")
    if not tensors:
        raise Malformed("it holds no KV")
    if tuple(block_checksums([tensor.bytes for tensor in tensors], count)) != head.checksums:
        raise Malformed("the checksum of a block is wrong")
    if not all(is_finite(x.dtype, x.bytes) for x in tensors):
        raise Malformed("it holds NaN or infinity")
    kept = [_first_rows(tensor, shared) for tensor in tensors]
    return FetchedRun(start, start + shared, kept)


def pack_checkpoint(store: Store, saved: Saved, ids: Tokens) -> bytes:
    store.verify_checkpoint(saved, ids)
    data = bytearray(saved.nbytes)
    with open_file(saved.path) as fd:
        read_range(fd, 0, memoryview(data))
    return bytes(data)


def unpack_checkpoint(data: bytes, chain: Chain, position: int) -> list[Tensor]:
    head = checkpoint_of(header_of(data))
    if head.namespace != chain.namespace or head.digest != chain.at(position):
        raise Malformed("it belongs to another prefix")
    if head.position != position:
        raise Malformed("it holds another position")
    view = memoryview(data)
    tensors = [_tensor(view, place) for place in head.places]
    if checksum_of([tensor.bytes for tensor in tensors]) != head.checksum:
        raise Malformed("its checksum is wrong")
    if not all(is_finite(tensor.dtype, tensor.bytes) for tensor in tensors):
        raise Malformed("it holds NaN or infinity")
    return tensors


def _tensor(data: memoryview, place: Place) -> Tensor:
    held = data[place.offset : place.offset + place.nbytes]
    return Tensor(place.name, place.dtype, place.shape, held)


def _first_rows(tensor: Tensor, count: int) -> Tensor:
    nbytes = tensor.nbytes // tensor.shape[0] * count
    return Tensor(tensor.name, tensor.dtype, (count, *tensor.shape[1:]), tensor.bytes[:nbytes])
