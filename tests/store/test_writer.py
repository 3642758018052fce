"""The writer thread: in order, bounded, ended only by `close`."""

from __future__ import annotations

import threading
import time

import pytest

from mlxcache.errors import PrefixNotStored, StoreError
from mlxcache.store.writer import Job, Writer
from mlxcache.types import Tokens
from tests.store.content import assert_right, kv, snapshot, tokens


def run_job(ids: Tokens, start: int = 0, nbytes: int = 100, tag: object = None) -> Job:
    return Job(ids, start, kv(ids, start), nbytes, tag)


class Report:
    def __init__(self) -> None:
        self.told: list[tuple[object, StoreError | None]] = []
        self.threads: set[str] = set()
        self.fails = False
        self.go_on = threading.Event()
        self.go_on.set()
        self.held = threading.Event()

    def __call__(self, job: Job, error: StoreError | None) -> None:
        if self.fails:
            raise RuntimeError("cannot be told")
        self.told.append((job.tag, error))
        self.threads.add(threading.current_thread().name)
        self.held.set()
        self.go_on.wait(10)

    def hold(self) -> None:
        self.go_on.clear()


def wait_until_done(writer: Writer) -> None:
    done = threading.Event()
    writer.call(done.set)
    assert done.wait(10)


@pytest.fixture
def report():
    return Report()


@pytest.fixture
def writer(store, report):
    writer = Writer(store, 250, report)
    yield writer
    report.go_on.set()
    writer.close()


def test_jobs_are_written_in_the_order_of_their_offer(writer, store, report):
    ids = tokens(900)
    seen: list[int] = []
    offers = [
        Job(ids[:300], 0, kv(ids[:300]), 10, "a"),
        Job(ids[:300], None, snapshot(ids[:300]), 10, "b"),
        Job(ids, 256, kv(ids, 256), 10, "c"),
    ]
    assert all(writer.offer(job) for job in offers)
    writer.call(lambda: seen.append(store.find(ids).length))
    wait_until_done(writer)
    assert report.told == [("a", None), ("b", None), ("c", None)]
    assert seen == [900]
    assert report.threads == {"mlxcache-writer"}
    assert len(assert_right(store, ids).checkpoints) == 1


def test_offers_beyond_the_limit_are_refused_at_once(writer, report):
    report.hold()
    assert writer.offer(run_job(tokens(100, 1), tag=1))
    assert report.held.wait(10)
    began = time.monotonic()
    assert writer.offer(run_job(tokens(100, 2), tag=2))
    assert not writer.offer(run_job(tokens(100, 3), tag=3))
    assert writer.offer(run_job(tokens(100, 4), nbytes=50, tag=4))
    assert time.monotonic() - began < 30  # the write is held until go_on
    assert not writer.offer(run_job(tokens(100, 5), nbytes=1, tag=5))
    report.go_on.set()
    wait_until_done(writer)
    assert [tag for tag, _ in report.told] == [1, 2, 4]
    assert writer.offer(run_job(tokens(100, 6), nbytes=10**9, tag=6))


def test_an_error_is_reported_and_the_next_job_is_written(writer, store, report, caplog):
    ids = tokens(300)
    writer.offer(Job(ids, 128, kv(ids, 128), 10, "no prefix"))
    writer.offer(Job(ids, 0, [], 10, "no tensors"))
    writer.call(lambda: 1 / 0)
    writer.offer(Job(ids, 0, kv(ids), 10, "right"))
    wait_until_done(writer)
    (_, first), (_, second), (_, third) = report.told
    assert isinstance(first, PrefixNotStored)
    assert type(second) is StoreError
    assert third is None
    assert "ZeroDivisionError" in caplog.text
    assert assert_right(store, ids).length == 300
    report.fails = True
    writer.offer(run_job(tokens(100, 5)))
    wait_until_done(writer)
    assert writer.offer(run_job(tokens(100, 6), nbytes=10**9))
    assert "cannot be told" in caplog.text


def test_close_ends_after_the_job_in_hand(writer, store, report):
    report.hold()
    writer.offer(run_job(tokens(100, 1), tag=1))
    assert report.held.wait(10)
    writer.offer(run_job(tokens(100, 2), tag=2))
    closer = threading.Thread(target=writer.close)
    closer.start()
    time.sleep(0.05)
    assert closer.is_alive()
    report.go_on.set()
    closer.join(10)
    assert not closer.is_alive()
    assert [tag for tag, _ in report.told] == [1]
    assert not writer.offer(run_job(tokens(100, 3)))
    assert store.find(tokens(100, 2)).length == 0


def test_uses_are_noted_when_idle(store, report, monkeypatch):
    """Other processes that evict then know what this one reads."""
    monkeypatch.setattr("mlxcache.store.writer.IDLE_S", 0.05)
    ids = tokens(100)
    writer = Writer(store, 100, report)
    writer.offer(run_job(ids))
    wait_until_done(writer)
    query = "SELECT max(used) FROM file"
    with store.database.read() as connection:
        (before,) = connection.execute(query).fetchone()
    time.sleep(0.01)
    store.find(ids)
    deadline = time.monotonic() + 5
    after = before
    while after == before and time.monotonic() < deadline:
        time.sleep(0.02)
        with store.database.read() as connection:
            (after,) = connection.execute(query).fetchone()
    writer.close()
    assert after > before
