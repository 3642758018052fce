"""Objects in a folder: names, contents, listings, damage, and the key."""

from __future__ import annotations

import pytest

from mlxcache.remote.objects import Objects, open_remote

KEY = b"0123456789abcdef" * 2


@pytest.fixture(params=[None, KEY], ids=["plain", "sealed"])
def key(request):
    return request.param


@pytest.fixture
def objects(tmp_path, key):
    opened = open_remote(f"file://{tmp_path}", key=key)
    yield opened
    opened.close()


def stored(folder) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file())


def test_an_object_is_read_as_it_was_written(objects: Objects):
    """Its size is that of its content."""
    objects.put("v1/space/run/0a", b"hello")
    assert objects.get("v1/space/run/0a") == b"hello"
    assert objects.head("v1/space/run/0a") == 5
    objects.put("v1/space/run/0a", memoryview(b"again and again"))
    assert objects.get("v1/space/run/0a") == b"again and again"


def test_an_absent_object_is_none(objects: Objects):
    """For all ways to ask for it."""
    objects.put("v1/a", b"x")
    assert objects.head("v1/b") is None
    assert objects.get("v1/b") is None
    assert objects.head_many(["v1/b", "v1/a"]) == [None, 1]
    assert objects.get_many(["v1/a", "v1/b", "v1/a"]) == [b"x", None, b"x"]


def test_a_listing_has_the_names_below_a_prefix(objects: Objects):
    """In order, and no more than asked for."""
    for name in ("v1/s/ckpt/g/2-a", "v1/s/ckpt/g/1-b", "v1/s/ckpt/gg/1-c", "v1/s/run/g"):
        objects.put(name, b"")
    assert objects.list("v1/s/ckpt/g/", 10) == ["v1/s/ckpt/g/1-b", "v1/s/ckpt/g/2-a"]
    assert len(objects.list("v1/s", 3)) == 3
    assert objects.list("v1/none", 3) == []


def test_a_deleted_object_is_absent(objects: Objects):
    """Deleting it again is no error."""
    objects.put("v1/s/run/g", b"x")
    objects.delete("v1/s/run/g")
    objects.delete("v1/s/run/g")
    assert objects.head("v1/s/run/g") is None
