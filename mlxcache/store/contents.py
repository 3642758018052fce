"""What files of runs and checkpoints say of themselves, beside their tensors."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlxcache.store.digests import BLOCK, DIGEST_BYTES, extend, partial
from mlxcache.store.folder import CHECKPOINT, RUN
from mlxcache.store.safetensors import Header, Malformed, compose, read_header
from mlxcache.store.tensors import Tensor
from mlxcache.types import Tokens

VERSION = "1"
_CHECKSUM_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A run's own words: `tokens` from position `start`, after the prefix of digest `base`.

    `checksums` has 8 bytes per block, the last one perhaps partial. They leave out the tensors
    named in `late`, which only positions soon after the run need, and which have `late_checksums`.
    """

    header: Header
    namespace: str
    base: bytes
    start: int
    tokens: Tokens
    checksums: tuple[bytes, ...]
    late: frozenset[str] = frozenset()
    late_checksums: tuple[bytes, ...] = ()

    @property
    def digests(self) -> list[bytes]:
        """The digests after each of its whole blocks."""
        return extend(self.base, self.tokens)

    @property
    def digest(self) -> bytes:
        """The digest of the prefix that ends with it, by which its file is named."""
        whole = len(self.tokens) // BLOCK
        return partial([self.base, *self.digests][whole], self.tokens[whole * BLOCK :])


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint's own words: state after the `position` tokens of `digest`.

    `base` is the digest of their whole blocks, `previous` that of the checkpoint before it on its
    path when it was written, or empty.
    """

    header: Header
    namespace: str
    digest: bytes
    base: bytes
    position: int
    previous: bytes
    checksum: bytes


def run_header(run: Run, tensors: Sequence[Tensor]) -> bytes:
    """A run's bytes before its payload; its `header` does not matter."""
    metadata = {
        "format": f"mlxcache-{RUN}",
        "version": VERSION,
        "namespace": run.namespace,
        "base": run.base.hex(),
        "start": str(run.start),
        "tokens": base64.b64encode(np.ascontiguousarray(run.tokens, "<i4").tobytes()).decode(),
        "checksums": b"".join(run.checksums).hex(),
        "late": " ".join(sorted(run.late)),
        "late_checksums": b"".join(run.late_checksums).hex(),
    }
    return compose(metadata, tensors)


def checkpoint_header(checkpoint: Checkpoint, tensors: Sequence[Tensor]) -> bytes:
    """A checkpoint's bytes before its payload; its `header` does not matter."""
    metadata = {
        "format": f"mlxcache-{CHECKPOINT}",
        "version": VERSION,
        "namespace": checkpoint.namespace,
        "digest": checkpoint.digest.hex(),
        "base": checkpoint.base.hex(),
        "position": str(checkpoint.position),
        "previous": checkpoint.previous.hex(),
        "checksum": checkpoint.checksum.hex(),
    }
    return compose(metadata, tensors)


def read_run(fd: int) -> Run:
    """What the open file says, checked as far as its header alone goes.

    Raises Malformed where it is no run of ours, and OSError.
    """
    header = read_header(fd)
    try:
        _expect(header, RUN)
        words = header.metadata
        tokens = np.frombuffer(base64.b64decode(words["tokens"], validate=True), "<i4")
        sums, late = _sums(words["checksums"]), _sums(words["late_checksums"])
        run = Run(
            header,
            words["namespace"],
            bytes.fromhex(words["base"]),
            int(words["start"]),
            tokens.astype(np.int32),
            sums,
            frozenset(words["late"].split()),
            late,
        )
    except (KeyError, ValueError, binascii.Error) as error:
        raise Malformed(f"its metadata is not a run's ({error})") from error
    count = len(tokens)
    if not count or run.start % BLOCK or run.start < 0 or len(run.base) != DIGEST_BYTES:
        raise Malformed("its metadata is not a run's")
    blocks = (count + BLOCK - 1) // BLOCK
    if len(sums) != blocks or len(late) != (blocks if run.late else 0):
        raise Malformed("it has not one checksum per block")
    return run


def _sums(text: str) -> tuple[bytes, ...]:
    sums = bytes.fromhex(text)
    return tuple(sums[at : at + 8] for at in range(0, len(sums), _CHECKSUM_BYTES))


def read_checkpoint(fd: int) -> Checkpoint:
    """As `read_run`, of a checkpoint."""
    header = read_header(fd)
    try:
        _expect(header, CHECKPOINT)
        words = header.metadata
        checkpoint = Checkpoint(
            header,
            words["namespace"],
            bytes.fromhex(words["digest"]),
            bytes.fromhex(words["base"]),
            int(words["position"]),
            bytes.fromhex(words["previous"]),
            bytes.fromhex(words["checksum"]),
        )
    except (KeyError, ValueError) as error:
        raise Malformed(f"its metadata is not a checkpoint's ({error})") from error
    if len(checkpoint.digest) != DIGEST_BYTES or checkpoint.position <= 0:
        raise Malformed("its metadata is not a checkpoint's")
    return checkpoint


def _expect(header: Header, kind: str) -> None:
    words = header.metadata
    if words["format"] != f"mlxcache-{kind}" or words["version"] != VERSION:
        raise Malformed(f"it is no {kind} of version {VERSION}")
