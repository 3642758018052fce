"""A remote that is gone, frozen, slow, wrong or refuses is skipped, and used again by itself."""

from __future__ import annotations

import logging
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from mlxcache.errors import ConfigError, RemoteUnavailable
from mlxcache.remote.objects import Limits, Objects, open_remote
from tests.remote.fault_proxy import FaultProxy

KEY, OTHER = b"k" * 32, b"o" * 32
QUICK = Limits(operation_s=0.4, start_s=1.0, probe_s=0.05)
NAME = "v1/space/run/0a"


@pytest.fixture
def opened():
    with ExitStack() as stack:

        def open_one(*args, **options) -> Objects:
            objects = open_remote(*args, **options)
            stack.callback(objects.close)
            return objects

        yield open_one
    assert "mlxcache-remote" not in [one.name for one in threading.enumerate()]


@pytest.fixture
def objects(proxy: FaultProxy, bucket: str, opened) -> Objects:
    opened(bucket).put(NAME, b"kept")
    made = opened(bucket, limits=QUICK)
    wait_for(lambda: made.writable)  # a busy machine may miss its first deadline
    return made


def wait_for(condition, seconds=5.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


def state(objects: Objects) -> str:
    return objects.figures()["state"]


@pytest.mark.parametrize("fault", ["gone", "frozen", "garbage"])
def test_a_remote_that_fails_is_skipped_until_it_works_again(objects, proxy, fault, caplog):
    caplog.set_level(logging.INFO, "mlxcache.remote")
    failed = objects.figures()["errors"]
    proxy.set(fault)
    began = time.monotonic()
    with pytest.raises(RemoteUnavailable, match="s3://bucket"):
        objects.get(NAME)
    assert time.monotonic() - began < QUICK.operation_s + 0.3
    assert not objects.available
    assert not objects.writable
    began = time.monotonic()
    for call in (
        lambda: objects.head(NAME),
        lambda: objects.get_many([NAME] * 9),
        lambda: objects.head_many([NAME] * 9),
        lambda: objects.put(NAME, b"other"),
        lambda: objects.list("v1", 9),
        lambda: objects.delete(NAME),
    ):
        with pytest.raises(RemoteUnavailable, match="skipped"):
            call()
    assert time.monotonic() - began < 0.1
    figures = objects.figures()
    assert figures["state"] == "unavailable"
    assert figures["reason"]
    assert figures["errors"] == failed + 1
    proxy.set("none")
    wait_for(lambda: objects.writable)
    assert objects.get(NAME) == b"kept"
    assert objects.figures()["reason"] is None
    lines = [one.getMessage() for one in caplog.records]
    assert [line.partition(":")[0] for line in lines] == ["remote is not used", "remote is used"]


def test_a_server_that_is_stopped_is_found_at_the_start(bucket, use_endpoint, opened):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        use_endpoint(f"http://127.0.0.1:{closed.getsockname()[1]}")
        began = time.monotonic()
        objects = opened(bucket, limits=QUICK)
        assert time.monotonic() - began < 1
        assert objects.figures()["reason"] == "connection refused"
        assert not objects.available
        objects.close()


def test_a_frozen_server_costs_the_start_its_deadline(bucket, proxy, opened):
    proxy.set("frozen")
    began = time.monotonic()
    objects = opened(bucket, limits=QUICK)
    assert time.monotonic() - began < QUICK.start_s + 0.3
    assert not objects.available
    began = time.monotonic()
    objects.close()
    assert time.monotonic() - began < 0.2
    proxy.set("none")


def test_a_remote_that_refuses_writes_is_still_read(objects, proxy):
    proxy.set("read-only")
    with pytest.raises(RemoteUnavailable, match="403 Forbidden"):
        objects.put("v1/space/run/0b", b"x")
    assert objects.available
    assert not objects.writable
    assert objects.figures()["state"] == "read-only"
    assert objects.get(NAME) == b"kept"
    proxy.set("none")
    wait_for(lambda: objects.writable)
    objects.put("v1/space/run/0b", b"x")


def test_a_busy_server_is_skipped_at_the_third_failure(objects, proxy):
    """One 503 may be the provider's way to slow a client down."""
    proxy.set("busy")
    for _ in range(2):
        with pytest.raises(RemoteUnavailable, match="503"):
            objects.head(NAME)
        assert objects.available
    with pytest.raises(RemoteUnavailable):
        objects.head(NAME)
    assert not objects.available
    proxy.set("none")
    wait_for(lambda: objects.available)


def test_a_slow_transfer_is_broken_off(proxy, bucket, opened):
    limits = Limits(operation_s=0.3, least_down=4e6, least_up=4e6, probe_s=30)
    objects = opened(bucket, limits=limits)
    objects.put(NAME, bytes(2 << 20))
    proxy.set("slow", rate=1e6)
    began = time.monotonic()
    with pytest.raises(RemoteUnavailable, match="too slow"):
        objects.get(NAME)
    assert 0.7 < time.monotonic() - began < 1.2
    assert objects.figures()["download_bytes_per_s"] < 1.5e6
    assert not objects.available
    objects = opened(bucket, limits=limits)
    began = time.monotonic()
    with pytest.raises(RemoteUnavailable, match="too slow"):
        objects.put(NAME, bytes(2 << 20))
    assert 0.7 < time.monotonic() - began < 1.2
    assert objects.available
    assert not objects.writable
    proxy.set("none")


def test_a_caller_may_wait_less_than_the_deadline(objects, proxy):
    proxy.set("frozen")
    began = time.monotonic()
    with pytest.raises(RemoteUnavailable, match=r"0\.05 s"):
        objects.head(NAME, within=0.05)
    assert time.monotonic() - began < 0.3
    assert objects.available
    wait_for(lambda: not objects.available)
    proxy.set("none")


@pytest.mark.parametrize("key", [None, KEY], ids=["plain", "sealed"])
def test_a_damaged_object_is_not_used(proxy, bucket, key, opened):
    objects = opened(bucket, key=key, limits=QUICK)
    for number in range(3):
        objects.put(f"v1/{number}", b"content")
    proxy.set("damaged")
    assert objects.get("v1/0") is None
    assert objects.available
    assert objects.get_many(["v1/1", "v1/2"]) == [None, None]
    wait_for(lambda: not objects.available)
    assert objects.figures()["damaged_objects"] == 3
    assert "damaged" in objects.figures()["reason"]
    proxy.set("none")
    wait_for(lambda: objects.available)
    assert objects.get("v1/0") == b"content"


def test_another_key_is_told_at_the_start(bucket):
    open_remote(bucket, key=KEY).close()
    with pytest.raises(ConfigError, match="another key"):
        open_remote(bucket, key=OTHER)
    with pytest.raises(ConfigError, match="set --remote-key-file"):
        open_remote(bucket)
    open_remote(bucket, key=KEY).close()
    open_remote(bucket + "/plain").close()
    with pytest.raises(ConfigError, match="leave out --remote-key-file"):
        open_remote(bucket + "/plain", key=KEY)
    assert "mlxcache-remote" not in [one.name for one in threading.enumerate()]


def test_another_key_is_found_when_the_remote_comes_back(proxy, bucket, opened):
    open_remote(bucket, key=KEY).close()
    proxy.set("gone")
    objects = opened(bucket, key=OTHER, limits=QUICK)
    proxy.set("none")
    wait_for(lambda: "another key" in objects.figures()["reason"])
    with pytest.raises(RemoteUnavailable, match="another key"):
        objects.head(NAME)


def test_a_missing_bucket_is_told(s3, bucket, opened):
    objects = opened("s3://no-such-bucket/x", limits=QUICK)
    assert objects.figures()["state"] == "read-only"
    assert "no such bucket" in objects.figures()["reason"]


def test_closing_ends_operations_that_run(objects, proxy):
    proxy.set("frozen")
    errors: list[BaseException] = []

    def read() -> None:
        try:
            objects.get(NAME)
        except RemoteUnavailable as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: proxy.requests[-1][0] == "GET")
    reader.join(5)
    assert len(errors) == 1
    proxy.set("none")


def test_nothing_readable_is_in_a_sealed_bucket(bucket, s3, opened):
    import http.client

    def seen() -> bytes:
        connection = http.client.HTTPConnection(*s3)
        name = bucket.split("/")[2]
        connection.request("GET", f"/{name}?list-type=2")
        listing = connection.getresponse().read()
        connection.close()
        return listing

    sealed = opened(bucket, key=KEY)
    sealed.put("v1/namespace/run/digest", b"secret words" * 9)
    assert b"digest" not in seen()
    assert b"namespace" not in seen()
    assert sealed.list("v1/namespace", 9) == ["v1/namespace/run/digest"]
    plain = opened(bucket + "/plain")
    plain.put("v1/namespace/run/digest", b"secret words" * 9)
    assert b"team/plain/v1/namespace/run/digest" in seen()
