"""Reading files of the store and holding them to what the index says of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from mlxcache.store import checksums
from mlxcache.store.contents import Run, read_checkpoint, read_run
from mlxcache.store.digests import BLOCK
from mlxcache.store.found import Piece
from mlxcache.store.index import Row
from mlxcache.store.safetensors import Malformed
from mlxcache.types import Tokens


def run_is(
    fd: int, namespace: str, base: bytes, piece: Piece, ids: Tokens, *, late: bool = True
) -> None:
    """Check that the open file has what is wanted of `piece`, the KV of `ids` after `base`.

    Without `late`, its late tensors are not read.

    Raises Malformed and OSError.
    """
    content = read_run(fd)
    if content.namespace != namespace or content.base != base:
        raise Malformed("it belongs to another prefix")
    if (content.start, content.start + len(content.tokens)) != (piece.first, piece.last):
        raise Malformed("it holds other positions")
    wanted = slice(piece.start - piece.first, piece.end - piece.first)
    if not np.array_equal(content.tokens[wanted], ids[piece.start : piece.end]):
        raise Malformed("it holds other tokens")
    blocks = range(wanted.start // BLOCK, (wanted.stop + BLOCK - 1) // BLOCK)
    _blocks_are(fd, content, blocks, late)


def checkpoint_is(fd: int, namespace: str, digest: bytes, position: int) -> None:
    """Check that the open file is the state after the `position` tokens of `digest`.

    Raises Malformed and OSError.
    """
    content = read_checkpoint(fd)
    if content.namespace != namespace or content.digest != digest:
        raise Malformed("it belongs to another prefix")
    if content.position != position:
        raise Malformed("it holds another position")
    if checksums.of_file(fd, content.header) != content.checksum:
        raise Malformed("its checksum is wrong")


def whole(path: Path, row: Row) -> None:
    """Check a whole file against its row; for any namespace. Raises Malformed and OSError."""
    with opened(path) as fd:
        if os.fstat(fd).st_size != row.nbytes:
            raise Malformed("its size is not what the index says")
        if row.kind == "run":
            content = read_run(fd)
            if (content.start, content.digest) != (row.start, row.digest):
                raise Malformed("it is not the run that its name says")
            blocks = range(len(content.checksums))
            _blocks_are(fd, content, blocks, late=True)
        else:
            state = read_checkpoint(fd)
            if (state.position, state.digest) != (row.start, row.digest):
                raise Malformed("it is not the checkpoint that its name says")
            if checksums.of_file(fd, state.header) != state.checksum:
                raise Malformed("its checksum is wrong")


def _blocks_are(fd: int, content: Run, blocks: range, late: bool) -> None:
    """Raise Malformed unless each block has the checksum that its run gives."""
    places = content.header.places
    for names_late, sums in ((False, content.checksums), (True, content.late_checksums)):
        wanted = [place for place in places if (place.name in content.late) is names_late]
        if not names_late or (late and sums):
            found = checksums.of_file_blocks(fd, wanted, len(content.tokens), blocks)
            if tuple(found) != sums[blocks.start : blocks.stop]:
                raise Malformed("a block's checksum is wrong")


def read_ahead(path: Path) -> None:
    """Have the system read a file while others are checked, where it takes such advice."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), opened(path) as fd:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to read `path` by. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)
