"""Whatever a file claims to be: an error, a bounded one, and never KV that was not in it."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_hexdigest

from mlxcache.errors import SnapshotRefused, StoreError
from mlxcache.store.snapshot_format import Description
from mlxcache.store.snapshots import import_snapshot, read_snapshot
from tests.store.session_of import SPEC, held, ids_of, save, session, snapshot_in, store_in

LENGTH, SHARED = 150, 100
MEMORY = 64 << 20
FUZZ = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("good")
    main = ids_of(LENGTH)
    agent = ids_of(130, 1, head=main[:SHARED])
    with_states = store_in(folder / "store")
    save(with_states, main, states=[90])
    save(with_states, agent)
    return snapshot_in(folder / "s", with_states, session(main, agent)).read_bytes()


def header_of(content: bytes) -> dict[str, Any]:
    size = struct.unpack("<Q", content[:8])[0]
    found: dict[str, Any] = json.loads(content[8 : 8 + size])
    return found


def with_header(content: bytes, header: dict[str, Any]) -> bytes:
    """`content` under another header, whose own checksum is right."""
    size = struct.unpack("<Q", content[:8])[0]
    header["__metadata__"] = {"check": "0" * 16} | {
        k: v for k, v in header.get("__metadata__", {}).items() if k != "check"
    }
    ordered = {"__metadata__": header["__metadata__"]} | header
    text = json.dumps(ordered, separators=(",", ":")).encode()
    raw = struct.pack("<Q", len(text)) + text
    check = xxh3_64_hexdigest(raw).encode()
    return raw.replace(b'"check":"' + b"0" * 16, b'"check":"' + check, 1) + content[8 + size :]


def refused(tmp_path: Path, content: bytes) -> str:
    """Why `content` is refused, by the reader or at the latest while it is restored, or ""."""
    path = tmp_path / "file"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        snapshot = read_snapshot(path, spec=SPEC)
        import_snapshot(store_in(tmp_path / "fresh"), snapshot)
    except (SnapshotRefused, StoreError) as error:
        return str(error)
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < MEMORY
    return ""


@FUZZ
@given(content=st.binary(max_size=300))
def test_bytes(tmp_path: Path, content: bytes) -> None:
    assert refused(tmp_path, content)


@FUZZ
@given(size=st.integers(0, 2**64 - 1), content=st.binary(max_size=300))
def test_claimed_header_sizes(tmp_path: Path, size: int, content: bytes) -> None:
    assert refused(tmp_path, struct.pack("<Q", size) + content)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "U64", "I32", "BF16", "X", ""]) | JSON,
        "shape": st.lists(st.integers(-1, 2**63), max_size=6) | JSON,
        "data_offsets": st.lists(st.integers(-1, 2**63), max_size=3) | JSON,
    }
)


@FUZZ
@given(data=st.data())
def test_other_headers(tmp_path: Path, good: bytes, data: st.DataObject) -> None:
    """One entry of a sound header is another, or one too many, and its checksum is right.

    What is not refused then says the same in other words: an axis of size 1, an empty tensor.
    """
    header = header_of(good)
    names = [name for name in header if name != "__metadata__"]
    name = data.draw(st.sampled_from([*names, "kv.5.0", "checkpoint.0.x", "checkpoint.9.x", "x"]))
    if data.draw(st.booleans()):
        header[name] = data.draw(ENTRY | JSON)
    elif name in header:
        field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        header[name][field] = data.draw(JSON | st.sampled_from(["F32", "U8", [1], [0, 8]]))
    else:
        header[name] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    if not refused(tmp_path, with_header(good, header)):
        assert held(store_in(tmp_path / "fresh"), ids_of(LENGTH)) == LENGTH


@FUZZ
@given(data=st.data())
def test_other_descriptions(tmp_path: Path, good: bytes, data: st.DataObject) -> None:
    header = header_of(good)
    text = header["__metadata__"]["description"]
    value = json.loads(text)
    where = data.draw(st.sampled_from(["leaves", "checkpoints", "top"]))
    target = value if where == "top" else data.draw(st.sampled_from(value[where]))
    field = data.draw(st.sampled_from(sorted(target)))
    many = [json.loads(json.dumps(target))] * 300
    other = data.draw(
        JSON | st.integers(0, 300) | st.sampled_from([[], many[:1], many, 1 << 48, "x" * 200_000])
    )
    assume(other != target[field])
    target[field] = other
    header["__metadata__"]["description"] = json.dumps(value)
    assert refused(tmp_path, with_header(good, header))


@FUZZ
@given(
    leaves=st.lists(
        st.tuples(st.none() | st.integers(0, 5), *[st.sampled_from([0, 1, 64, 65, 128])] * 3),
        max_size=5,
    ),
    checkpoints=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 300)), max_size=3),
)
def test_a_description_that_is_accepted_holds_together(
    leaves: list[tuple[Any, ...]], checkpoints: list[tuple[int, int]]
) -> None:
    rest = {"kind": "main", "prompt_tokens": 0, "anchor": 0, "turns": 0, "last_used_at": 0}
    keys = ("parent", "start", "tokens", "rows")
    names = ("id", "namespace", "model", "label", "name", "title", "client")
    value: dict[str, Any] = dict.fromkeys(names, "x") | {
        "turns": 1,
        "created_at": 0,
        "last_used_at": 0,
    }
    value["leaves"] = [dict(zip(keys, leaf, strict=True)) | rest for leaf in leaves]
    value["checkpoints"] = [{"leaf": a, "position": b} for a, b in checkpoints]
    try:
        found = Description.decode(msgspec.json.encode(value).decode())
    except SnapshotRefused:
        return
    lengths = [leaf.start + leaf.tokens for leaf in found.leaves]
    for i, leaf in enumerate(found.leaves):
        assert leaf.start == 0 or (leaf.parent is not None and leaf.parent < i)
        assert leaf.parent is None or leaf.start <= lengths[leaf.parent]
        assert 0 <= leaf.rows <= leaf.tokens > 0
    assert all(c.position <= lengths[c.leaf] for c in found.checkpoints)


def test_every_length_that_is_not_its_own(tmp_path: Path, good: bytes) -> None:
    for length in (*range(0, 200), *range(200, len(good), 997), len(good) - 1):
        assert refused(tmp_path, good[:length])
    assert refused(tmp_path, good + b"\0")


@FUZZ
@given(at=st.integers(0), bit=st.integers(0, 7))
def test_any_flipped_bit_is_seen(tmp_path: Path, good: bytes, at: int, bit: int) -> None:
    content = bytearray(good)
    content[at % len(good)] ^= 1 << bit
    assert refused(tmp_path, bytes(content))


def test_swapped_blocks_are_seen(tmp_path: Path, good: bytes) -> None:
    header = header_of(good)
    start = 8 + struct.unpack("<Q", good[:8])[0]
    content = bytearray(good)
    for name, rows in [*((name, 64) for name in SPEC), ("checksums", 1)]:
        begin, end = (start + at for at in header[name]["data_offsets"])
        size = (end - begin) // header[name]["shape"][0] * rows
        a, b = slice(begin, begin + size), slice(begin + size, begin + 2 * size)
        content[a], content[b] = content[b], content[a]
    assert "checksum of some KV is wrong" in refused(tmp_path, bytes(content))


def test_nothing_of_a_refused_file_is_written(tmp_path: Path, good: bytes) -> None:
    content = bytearray(good)
    content[-100] ^= 1  # in the checkpoint, after all KV
    assert refused(tmp_path, bytes(content))
    assert held(store_in(tmp_path / "fresh"), ids_of(LENGTH)) == 0


def claims(header: dict[str, Any], name: str, shape: list[int]) -> dict[str, Any]:
    size = {"I32": 4, "U64": 8, "F32": 4, "BF16": 2, "U8": 1}[header[name]["dtype"]]
    for n in shape:
        size *= n
    begin = header[name]["data_offsets"][0]
    return header | {name: header[name] | {"shape": shape, "data_offsets": [begin, begin + size]}}


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "a header of 2 GB": lambda good: struct.pack("<Q", 2 << 30) + b"{",
    "a header of 7 MB of brackets": lambda good: struct.pack("<Q", 7 << 20) + b"[" * (7 << 20),
    "a header of 6 MB of lists": lambda good: with_header(
        good, header_of(good) | {"a": [[]] * (2 << 20)}
    ),
    "a header of 6 MB of tables": lambda good: with_header(
        good, header_of(good) | {"a": [{}] * (2 << 20)}
    ),
    "a header of long numbers": lambda good: (
        struct.pack("<Q", 4 << 20) + b'{"a":' + b"9" * ((4 << 20) - 6) + b"}"
    ),
    "a terabyte of tokens": lambda good: with_header(
        good, claims(header_of(good), "tokens", [1 << 38])
    ),
    "a terabyte of KV": lambda good: with_header(
        good, claims(header_of(good), "kv.0.0", [1 << 36, 2, 4])
    ),
    "a shape of a hundred axes": lambda good: with_header(
        good, claims(header_of(good), "kv.0.0", [2**62] * 100)
    ),
    "a shape of many axes": lambda good: with_header(
        good, header_of(good) | {"kv.0.0": {"dtype": "U8", "shape": [2**62] * 100_000,
                                            "data_offsets": [0, 0]}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_gets_an_error_and_not_memory(
    tmp_path: Path, good: bytes, name: str
) -> None:
    """In a process that may have 64 MB more than it begins with, and within seconds."""
    path = tmp_path / "file"
    path.write_bytes(HOSTILE[name](good))
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from mlxcache.errors import SnapshotRefused\n"
        "from mlxcache.store.snapshots import read_snapshot\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        f"resource.setrlimit(resource.RLIMIT_AS, (used + {MEMORY}, used + {MEMORY}))\n"
        "try:\n    read_snapshot(Path(sys.argv[1]))\n"
        "except SnapshotRefused as error:\n    print('refused:', error)\n"
    )
    if not Path("/proc/self/statm").exists():
        code = "\n".join(line for line in code.splitlines() if "used" not in line)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("refused: "), done.stderr
