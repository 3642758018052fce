"""What one server computed is fetched by another, verified, and nothing else."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxcache.errors import RemoteUnavailable
from mlxcache.remote import fetch, grid
from mlxcache.remote.objects import Objects
from mlxcache.remote.tier import LOOKUPS
from mlxcache.safetensors import Tensor, header_of
from mlxcache.store.digests import Chain
from mlxcache.store.kv_files import compose_run, run_of
from mlxcache.types import join_ids
from tests.remote.servers import CELL, server
from tests.store.content import assert_right, branch, kv, tokens


@pytest.fixture(autouse=True)
def small_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of four blocks; an object is little larger than its tensors."""
    monkeypatch.setattr(grid, "CELL_TOKENS", CELL)
    monkeypatch.setattr(fetch, "SPARE_BYTES", 4096)


def runs(share: Path) -> list[Path]:
    return [file for file in share.rglob("run/*") if file.is_file()]


@pytest.mark.parametrize("length", [40, 100, 256, 257, 1100])
def test_what_one_computed_the_other_has_to_the_token(tmp_path: Path, remote: Objects, length: int):
    ids = tokens(length)
    with server(tmp_path / "a", remote) as one, server(tmp_path / "b", remote) as other:
        one.computes(ids)
        prompt = join_ids(ids, tokens(200, seed=9))
        assert other.fetches(prompt) == (length if length >= 64 else 0)
        assert_right(other.store, prompt)
        assert other.store.check() == []


def test_a_conversation_goes_to_and_fro(tmp_path: Path, remote: Objects, share: Path):
    ids = tokens(1500)
    with server(tmp_path / "a", remote) as one, server(tmp_path / "b", remote) as other:
        ends = range(100, 1400, 130)
        for n, end in enumerate(ends):
            (one, other)[n % 2].computes(ids[:end])
            assert (other, one)[n % 2].fetches(ids[: end + 100]) == end
        assert len(runs(share)) <= len(ends) + max(ends) // CELL
        assert_right(one.store, ids)


def test_a_branch_gets_what_it_shares(tmp_path: Path, remote: Objects):
    ids = tokens(1200)
    with server(tmp_path / "a", remote) as one, server(tmp_path / "b", remote) as other:
        one.computes(ids)
        assert other.fetches(branch(ids, 700, 1300)) == 512


def test_a_second_server_uploads_nothing_that_is_there(tmp_path: Path, remote: Objects):
    ids = tokens(1200)
    with server(tmp_path / "a", remote) as one, server(tmp_path / "b", remote) as other:
        one.computes(ids)
        other.computes(ids)
        assert one.tier.figures()["uploaded_objects"] == 5
        assert other.tier.figures()["uploaded_objects"] == 0


def test_a_state_is_fetched_with_the_runs_before_it(tmp_path: Path, remote: Objects):
    ids = tokens(1400)
    with (
        server(tmp_path / "a", remote, opaque=True) as one,
        server(tmp_path / "b", remote, opaque=True) as other,
        server(tmp_path / "c", remote, opaque=True) as third,
    ):
        one.computes(ids[:1100], 300, 790, 1100)
        other.fetches(join_ids(ids[:1100], tokens(100, seed=5)))
        found = assert_right(other.store, ids[:1100])
        assert [state.position for state in found.checkpoints] == [1100]
        third.fetches(branch(ids, 1050, 1400))
        found = third.store.find(ids)
        assert [state.position for state in found.checkpoints] == [790]
        assert 790 <= found.length <= 1050


def with_nan(data: bytes, chain: Chain) -> bytes:
    """The object of a run with NaN in its last token, and the right checksums."""
    run = run_of(header_of(data))
    held = [bytearray(data[one.offset : one.offset + one.nbytes]) for one in run.places]
    place, raw = next(
        (one, raw)
        for one, raw in zip(run.places, held, strict=True)
        if one.dtype in ("F32", "F16", "BF16")
    )
    raw[-place.nbytes // len(run.tokens) :] = b"\xff" * (place.nbytes // len(run.tokens))
    tensors = [
        Tensor(one.name, one.dtype, one.shape, memoryview(raw))
        for one, raw in zip(run.places, held, strict=True)
    ]
    stop = run.start + len(run.tokens)
    head = compose_run(chain, run.start, stop, tensors)
    return b"".join([head, *held])


@pytest.mark.parametrize("damage", ["noise", "empty", "other", "flipped", "nan"])
def test_garbage_is_discarded_and_replaced(tmp_path: Path, remote: Objects, damage: str):
    ids = tokens(1000)
    name = grid.run_name
    with (
        server(tmp_path / "a", remote) as one,
        server(tmp_path / "b", remote) as other,
        server(tmp_path / "c", remote) as third,
    ):
        one.computes(ids)
        chain = one.store.chain(ids)
        good = remote.get(name(chain, 512))
        assert good is not None
        bad = {
            "noise": np.random.default_rng(1).bytes(len(good)),
            "empty": b"",
            "other": remote.get(name(chain, 256)),
            "nan": with_nan(good, chain),
            "flipped": good[:-50] + bytes([good[-50] ^ 1]) + good[-49:],
        }[damage]
        assert bad is not None
        remote.put(name(chain, 512), bad)
        assert other.fetches(ids) == 256
        assert_right(other.store, ids)
        assert remote.figures()["damaged_objects"] == 1
        other.computes(ids)
        assert third.fetches(ids) == 1000
        assert_right(third.store, ids)


def test_an_object_of_a_damaged_form_is_written_again(tmp_path: Path, remote: Objects, share: Path):
    ids = tokens(1000)
    with server(tmp_path / "a", remote) as one, server(tmp_path / "b", remote) as other:
        one.computes(ids)
        file = share / grid.run_name(one.store.chain(ids), 512)
        file.write_bytes(b"x" * 3000)
        assert other.fetches(ids) == 256
        other.computes(ids)
        assert remote.get(grid.run_name(one.store.chain(ids), 512)) is not None


class Slow:
    """A remote whose calls take `seconds` more, and whose writes fail while `refuses`."""

    def __init__(self, objects: Objects, seconds: float = 0.0):
        self.objects, self.seconds, self.refuses, self.puts = objects, seconds, False, 0
        self.available = self.writable = True

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            within = args[-1] if name != "put" and isinstance(args[-1], float) else 60.0
            threading.Event().wait(min(self.seconds, within))
            if self.seconds > within:
                raise RemoteUnavailable("too slow")
            if name == "put":
                self.puts += 1
                if self.refuses:
                    raise RemoteUnavailable("it is full")
            return getattr(self.objects, name)(*args, **more)

        return call


def test_a_slow_remote_takes_a_small_part_of_a_cold_prefill(tmp_path: Path, remote: Objects):
    ids = tokens(1000)
    with server(tmp_path / "a", remote) as one:
        one.computes(ids)
    slow: Any = Slow(remote, 2.0)
    with server(tmp_path / "b", slow) as other:
        began = time.monotonic()
        assert other.fetches(ids) == 0
        assert time.monotonic() - began < 0.1 * 1000 * 0.01 + 0.2
        found = other.store.find(ids)
        assert not other.tier.fetcher.wanted(ids, 0, found)


def test_what_is_computed_sooner_is_not_fetched(tmp_path: Path, remote: Objects):
    ids = tokens(1000)
    with server(tmp_path / "a", remote) as one, server(tmp_path / "b", remote) as other:
        one.computes(ids)
        pace = other.tier.fetcher.pace
        pace.note_bytes(1000, 10.0)
        assert other.fetches(ids) == 0
        assert other.tier.figures()["slower"] == 1


def test_an_unavailable_remote_is_skipped(tmp_path: Path, remote: Objects):
    ids = tokens(1000)
    down: Any = Slow(remote)
    with server(tmp_path / "b", down) as other:
        found = other.store.find(ids)
        assert other.tier.fetcher.wanted(ids, 0, found)
        assert not other.tier.fetcher.wanted(ids, 950, found)
        down.available = False
        assert not other.tier.fetcher.wanted(ids, 0, found)


def test_a_refused_upload_is_made_later(
    tmp_path: Path, remote: Objects, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mlxcache.remote.upload.FIRST_RETRY_S", 0.1)
    ids = tokens(1000)
    full: Any = Slow(remote)
    full.refuses = True
    with server(tmp_path / "a", full) as one, server(tmp_path / "b", remote) as other:
        for end in (300, 600, 1000):
            one.store.write_run(ids[:end], 0, kv(ids[:end]))
            one.tier.share(ids[:end])
        assert not one.tier.uploader.wait(0.3)
        assert one.tier.figures()["waiting"] <= 2
        full.refuses = False
        assert one.tier.uploader.wait(5)
        assert other.fetches(ids) == 1000


def test_an_end_waits_for_no_remote(tmp_path: Path, remote: Objects):
    slow: Any = Slow(remote, 30.0)
    ids = tokens(1000)
    with server(tmp_path / "a", slow) as one:
        one.store.write_run(ids, 0, kv(ids))
        one.tier.share(ids)
        began = time.monotonic()
    assert time.monotonic() - began < 3


def test_no_lookup_waits_for_another(tmp_path: Path, remote: Objects):
    ids = tokens(1000)
    slow: Any = Slow(remote, 1.0)
    with server(tmp_path / "b", slow) as other:
        found = other.store.find(ids)
        ended: list[float] = []
        began = time.monotonic()
        for _ in range(LOOKUPS + 3):
            other.tier.look_up(
                ids, 0, found, lambda: ended.append(time.monotonic() - began), lambda: False
            )
        while len(ended) < LOOKUPS:
            assert time.monotonic() - began < 5
            time.sleep(0.02)
        assert len(ended) == LOOKUPS
        assert max(ended) < 0.1 * 1000 * 0.01 + 0.3
