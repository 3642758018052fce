"""Objects in a folder: names, contents, listings, damage, and the key."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mlxcache.errors import RemoteUnavailable
from mlxcache.remote.objects import Limits, Objects, open_remote

KEY = b"0123456789abcdef" * 2


@pytest.fixture(params=[None, KEY], ids=["plain", "sealed"])
def key(request):
    return request.param


@pytest.fixture
def objects(tmp_path, key):
    opened = open_remote(f"file://{tmp_path}", key=key)
    yield opened
    opened.close()


def stored_files(folder: Path) -> list[Path]:
    files = sorted(one for one in folder.rglob("*") if one.is_file())
    return [one for one in files if one.name != "mlxcache.json"]


def test_an_object_is_read_as_it_was_written(objects: Objects):
    objects.put("v1/space/run/0a", b"hello")
    assert objects.get("v1/space/run/0a") == b"hello"
    assert objects.head("v1/space/run/0a") == 5
    objects.put("v1/space/run/0a", memoryview(b"again and again"))
    assert objects.get("v1/space/run/0a") == b"again and again"


def test_an_absent_object_is_none(objects: Objects):
    objects.put("v1/a", b"x")
    assert objects.head("v1/b") is None
    assert objects.get("v1/b") is None
    assert objects.head_many(["v1/b", "v1/a"]) == [None, 1]
    assert objects.get_many(["v1/a", "v1/b", "v1/a"]) == [b"x", None, b"x"]


def test_a_listing_has_the_names_below_a_prefix(objects: Objects):
    for name in ("v1/s/ckpt/g/2-a", "v1/s/ckpt/g/1-b", "v1/s/ckpt/gg/1-c", "v1/s/run/g"):
        objects.put(name, b"")
    assert objects.list("v1/s/ckpt/g/", 10) == ["v1/s/ckpt/g/1-b", "v1/s/ckpt/g/2-a"]
    assert len(objects.list("v1/s", 3)) == 3
    assert objects.list("v1/none", 3) == []


def test_a_deleted_object_is_absent(objects: Objects):
    objects.put("v1/s/run/g", b"x")
    objects.delete("v1/s/run/g")
    objects.delete("v1/s/run/g")
    assert objects.head("v1/s/run/g") is None


def test_a_share_that_is_unmounted_is_not_made_anew(tmp_path, key):
    """What is written beside it would be on the wrong disk; it is used again once it is back."""
    share, away = tmp_path / "share", tmp_path / "away"
    share.mkdir()
    opened = open_remote(f"file://{share}", key=key, limits=Limits(probe_s=0.02))
    opened.put("v1/s/run/g", b"x")
    share.rename(away)
    with pytest.raises(RemoteUnavailable, match="not mounted"):
        opened.put("v1/s/run/h", b"x")
    assert not opened.available
    time.sleep(0.2)  # probes
    assert not opened.available
    assert not share.exists()
    away.rename(share)
    until = time.monotonic() + 5
    while not opened.writable:
        assert time.monotonic() < until
        time.sleep(0.01)
    opened.put("v1/s/run/h", b"x")
    assert opened.get("v1/s/run/g") == b"x"
    opened.close()


def test_a_name_is_made_of_parts(objects: Objects):
    for name in (
        "",
        "/v1/a",
        "v1//a",
        "v1/../a",
        "v1/a/",
        "v1/.a",
        "v1/a#1",
        "v1/a b",
        "v1/\u00e9",
    ):
        with pytest.raises(ValueError, match="name of an object"):
            objects.put(name, b"")


def test_a_sealed_object_belongs_to_its_name(tmp_path):
    for name, key in (("plain", None), ("sealed", KEY)):
        folder = tmp_path / name
        folder.mkdir()
        opened = open_remote(f"file://{folder}", key=key)
        opened.put("v1/a", b"content of a")
        opened.put("v1/b", b"content of b")
        one, other = (path for path in stored_files(folder))
        one.write_bytes(other.read_bytes())
        assert sorted([opened.get("v1/a"), opened.get("v1/b")], key=str).count(None) == 1
        other.write_bytes(other.read_bytes()[:20])
        assert [opened.get("v1/a"), opened.get("v1/b")] == [None, None]
        opened.close()


def test_an_object_that_is_larger_than_expected_is_not_read(tmp_path, key):
    """It counts as damaged, and others are read: whoever writes to a bucket fills no memory."""
    opened = open_remote(f"file://{tmp_path}", key=key)
    opened.put("v1/a", bytes(1000))
    opened.put("v1/b", b"b")
    (path,) = (one for one in stored_files(tmp_path) if one.stat().st_size > 1000)
    os.truncate(path, 1 << 40)
    assert opened.get("v1/a", most=1000) is None
    assert opened.get_many(["v1/a", "v1/b"], most=1000) == [None, b"b"]
    assert opened.available
    os.truncate(tmp_path / "v1/mlxcache.json", 1 << 40)
    opened.close()
    again = open_remote(f"file://{tmp_path}", key=key)
    assert not again.available
    again.close()


@pytest.mark.parametrize(
    "marker",
    [
        b"[" * 60_000,
        b"[]",
        b"{}",
        b"\xff",
        b'{"version": [1], "key": null}',
        b'{"version":1,"key":2}',
    ],
)
def test_a_marker_that_makes_no_sense_leaves_the_remote_unused(tmp_path, marker):
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1/mlxcache.json").write_bytes(marker)
    opened = open_remote(f"file://{tmp_path}")
    assert not opened.available
    assert "damaged" in opened.figures()["reason"]
    opened.close()


def test_each_writing_of_a_name_has_a_nonce_of_its_own(tmp_path):
    opened = open_remote(f"file://{tmp_path}", key=KEY)
    seen = set()
    for _ in range(50):
        opened.put("v1/a", b"the same")
        (path,) = stored_files(tmp_path)
        seen.add(path.read_bytes())
    opened.close()
    assert len(seen) == 50


def test_a_closed_remote_is_unavailable(objects: Objects):
    objects.close()
    objects.close()
    assert not objects.available
    with pytest.raises(RemoteUnavailable, match="closed"):
        objects.head("v1/a")
