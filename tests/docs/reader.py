"""A reader of the cache folder by docs/disk-format.md alone: nothing of mlxcache is used here."""

from __future__ import annotations

import base64
import json
import math
import sqlite3
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

BLOCK = 64
SIZES = {"U8": 1, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "U64": 8}


class Doubt(Exception):
    """Something is not as the format has it: a miss."""


def doubt(unless: bool, what: str) -> None:
    """Raise Doubt unless it holds."""
    if not unless:
        raise Doubt(what)


def digest_of(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def digests(namespace: str, ids: np.ndarray) -> list[bytes]:
    """After each whole block, the root first."""
    found = [digest_of(namespace.encode())]
    for at in range(0, len(ids) // BLOCK * BLOCK, BLOCK):
        found.append(digest_of(found[-1] + ids[at : at + BLOCK].astype("<i4").tobytes()))
    return found


def digest_at(namespace: str, ids: np.ndarray, position: int) -> bytes:
    """After the first `position` tokens."""
    whole, rest = divmod(position, BLOCK)
    before = digests(namespace, ids[: whole * BLOCK])[-1]
    tail = ids[whole * BLOCK : position].astype("<i4").tobytes()
    return digest_of(before + tail + bytes([rest])) if rest else before


@dataclass
class File:
    """A safetensors file whose header was checked."""

    words: dict[str, str]
    tensors: dict[str, tuple[str, list[int], bytes]]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    doubt(len(dict(pairs)) == len(pairs), "a key stands twice")
    return dict(pairs)


def open_file(path: Path) -> File:
    """All of it, once its header is right."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    doubt(2 <= length <= min(100_000_000, len(raw) - 8), "the header does not fit")
    opening = b'{"__metadata__":{"check":"'
    doubt(raw[8:].startswith(opening), "no check stands first")
    at = 8 + len(opening)
    zeroed = raw[:at] + b"0" * 16 + raw[at + 16 : 8 + length]
    doubt(raw[at : at + 16].decode() == xxhash.xxh3_64_hexdigest(zeroed), "the header is damaged")
    header = json.loads(raw[8 : 8 + length], object_pairs_hook=_once)
    words, tensors, end = header.pop("__metadata__"), {}, 0
    for name, one in header.items():
        begin, stop = one["data_offsets"]
        doubt(begin == end, "a gap or an overlap")
        doubt(stop - begin == math.prod(one["shape"]) * SIZES[one["dtype"]], "another size")
        tensors[name] = (one["dtype"], one["shape"], raw[8 + length + begin : 8 + length + stop])
        end = stop
    doubt(8 + length + end == len(raw), "another end")
    return File(words, tensors)


def read_run(path: Path, namespace: str, ids: np.ndarray, start: int, end: int) -> File:
    """The run from token `start` on, whose tokens to `end` are of use for `ids`."""
    file = open_file(path)
    words = file.words
    doubt((words["format"], words["version"]) == ("mlxcache-run", "1"), "no run")
    doubt(words["namespace"] == namespace, "another model's")
    doubt(int(words["start"]) == start and start % BLOCK == 0, "other positions")
    doubt(bytes.fromhex(words["base"]) == digest_at(namespace, ids, start), "another prefix")
    tokens = np.frombuffer(base64.b64decode(words["tokens"]), "<i4")
    doubt(np.array_equal(tokens[: end - start], ids[start:end]), "other tokens")
    doubt(words["checksums"] == _block_sums(file, len(tokens)), "checksums are wrong")
    return file


def _block_sums(file: File, tokens: int) -> str:
    sums = ""
    for first in range(0, tokens, BLOCK):
        state = xxhash.xxh3_64()
        for _, shape, data in file.tensors.values():
            doubt(shape[0] == tokens, "not a row for each token")
            row = len(data) // tokens
            state.update(data[first * row : min(first + BLOCK, tokens) * row])
        sums += state.hexdigest()
    return sums


def read_checkpoint(path: Path, namespace: str, ids: np.ndarray, position: int) -> File:
    """The state after the first `position` of `ids`."""
    file = open_file(path)
    words = file.words
    doubt((words["format"], words["version"]) == ("mlxcache-checkpoint", "1"), "no checkpoint")
    doubt(words["namespace"] == namespace, "another model's")
    doubt(int(words["position"]) == position, "another position")
    doubt(bytes.fromhex(words["digest"]) == digest_at(namespace, ids, position), "another prefix")
    state = xxhash.xxh3_64()
    for _, _, data in file.tensors.values():
        state.update(data)
    doubt(words["checksum"] == state.hexdigest(), "the checksum is wrong")
    return file


@dataclass
class Found:
    """Runs as (file, its start, from, to), and checkpoints as (file, position)."""

    length: int
    runs: list[tuple[Path, int, int, int]]
    checkpoints: list[tuple[Path, int]]


def find(store: Path, namespace: str, ids: np.ndarray) -> Found:
    """The longest prefix of `ids`, to the token, and the checkpoints along it."""
    index = sqlite3.connect(f"{(store / 'index.sqlite').as_uri()}?mode=ro", uri=True)
    assert index.execute("PRAGMA user_version").fetchone() == (1,)
    keys = digests(namespace, ids)
    marks = ",".join("?" * len(keys))
    rows = index.execute(
        "SELECT kind, digest, start, ids FROM file LEFT JOIN tokens ON file = id"
        f" WHERE owner IS NULL AND (key IN ({marks}) OR kind = 'run' AND base IN ({marks}))",
        keys * 2,
    ).fetchall()
    index.close()
    reaches, checkpoints = [], []
    for kind, digest, start, raw in rows:
        path = store / f"{kind}s" / digest.hex()[:2] / f"{digest.hex()}.safetensors"
        if kind == "checkpoint":
            if start <= len(ids) and digest == digest_at(namespace, ids, start):
                checkpoints.append((path, start))
            continue
        own = np.frombuffer(raw, "<i4")[: len(ids) - start]
        agree = own == ids[start : start + len(own)]
        reaches.append((path, start, start + (len(own) if agree.all() else int(agree.argmin()))))
    runs, cursor = [], 0
    while best := max(
        (r for r in reaches if r[1] <= cursor < r[2]), key=lambda r: r[2], default=()
    ):
        runs.append((best[0], best[1], cursor, best[2]))
        cursor = best[2]
    return Found(cursor, runs, sorted(checkpoints, key=lambda one: one[1]))
