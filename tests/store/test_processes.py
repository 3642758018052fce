"""Processes that share a folder, and processes that die."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mlxcache.errors import StoreError
from mlxcache.store import folder as store_folder
from mlxcache.store import saving
from tests.store.content import assert_right, files, opened, put, snapshot, tokens, turns
from tests.store.soak import ROOT, soak


def run_python(code: str) -> subprocess.Popen[str]:
    head = "from pathlib import Path\nfrom tests.store.content import *\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_what_is_durable_survives_kill_9_at_any_moment(tmp_path):
    assert soak(15, tmp_path, 7) > 15


@pytest.mark.parametrize(
    "step", ["folder.os.ftruncate", "folder.sync", "folder.os.rename", "saving.index.put_tokens"]
)
def test_a_death_at_each_step_of_a_save_leaves_nothing(folder, step):
    ids = tokens(500)
    code = (
        "import os\nfrom mlxcache.store import folder, saving\n"
        f"with opened(Path({str(folder)!r})) as store:\n"
        "    put(store, tokens(500)[:200])\n"
        f"    {step} = lambda *_, **__: os.kill(os.getpid(), 9)\n"
        "    put(store, tokens(500), 192)\n"
    )
    assert run_python(code).wait() == -9
    with opened(folder) as store:
        assert store.check() == []
        assert len(files(folder)) == 1
        assert not list(folder.rglob(".*.tmp"))
        assert assert_right(store, ids).length == 200
        put(store, ids, 192)
        assert assert_right(store, ids).length == 500


def test_each_finds_what_the_other_saved(folder):
    ids = tokens(600)
    with opened(folder) as store:
        put(store, ids[:300])
        code = (
            f"with opened(Path({str(folder)!r})) as store:\n"
            "    ids = tokens(600)\n"
            "    assert assert_right(store, ids).length == 300\n"
            "    put(store, ids, 256)\n"
            "    store.write_checkpoint(ids, snapshot(ids))\n"
        )
        assert run_python(code).wait() == 0
        found = assert_right(store, ids)
        assert found.length == 600
        assert [saved.position for saved in found.checkpoints] == [600]


def test_an_error_names_the_file_that_another_store_goes_on_writing(folder, monkeypatch):
    monkeypatch.setattr(saving, "WAIT_S", 0.1)
    ids = tokens(200)
    with opened(folder) as one, opened(folder) as other:
        put(one, ids)
        with one.database.write() as connection:
            connection.execute("UPDATE file SET owner = ?", (one.context.lock.name,))
        (path,) = files(folder)
        with pytest.raises(StoreError, match=f"Another process has been writing {path} for 0 s"):
            put(other, ids)


def test_both_save_the_same_at_once(folder):
    code = (
        f"with opened(Path({str(folder)!r})) as store:\n"
        "    for seed in range(40):\n"
        "        ids = tokens(1500, seed)\n"
        "        turns(store, ids, 500, 1000, 1500)\n"
        "        store.write_checkpoint(ids, snapshot(ids))\n"
    )
    others = [run_python(code) for _ in range(2)]
    assert [other.wait() for other in others] == [0, 0]
    with opened(folder) as store:
        assert store.check() == []
        assert (store.stats().runs, store.stats().checkpoints) == (120, 40)
        for seed in range(40):
            assert assert_right(store, tokens(1500, seed)).length == 1500


def test_a_file_that_another_is_writing_is_waited_for(folder, monkeypatch):
    ids = tokens(300)
    go_on = threading.Event()
    begun = threading.Event()
    original = store_folder.sync_folder

    with opened(folder) as one, opened(folder) as two:

        def slow(path: Path) -> None:
            if threading.current_thread() is first:
                begun.set()
                go_on.wait(10)
            original(path)

        monkeypatch.setattr(store_folder, "sync_folder", slow)
        first = threading.Thread(target=put, args=(one, ids))
        second = threading.Thread(target=put, args=(two, ids))
        first.start()
        assert begun.wait(10)
        second.start()
        second.join(0.2)
        assert second.is_alive()
        assert two.find(ids).length == 0
        go_on.set()
        first.join()
        second.join()
        assert assert_right(two, ids).length == 300
        assert one.stats().written_bytes > 0
        assert two.stats().written_bytes == 0


def test_what_a_dead_process_was_writing_is_taken_over(folder):
    ids = tokens(300)
    code = (
        "import os\n"
        "from mlxcache.store import folder as store_folder\n"
        f"with opened(Path({str(folder)!r})) as store:\n"
        "    os.rename = lambda *_: os.kill(os.getpid(), 9)\n"
        "    put(store, tokens(300))\n"
    )
    with opened(folder) as store:
        assert run_python(code).wait() == -9
        put(store, ids)
        assert assert_right(store, ids).length == 300
        assert store.stats().runs == 1
    with opened(folder) as store:
        assert not list(folder.rglob(".*.tmp"))
        assert store.check() == []


def test_a_second_store_leaves_the_firsts_work_alone(folder, monkeypatch):
    ids = tokens(300)
    with opened(folder) as one:
        original = os.rename

        def open_another(*paths: Path) -> None:
            monkeypatch.setattr(os, "rename", original)
            with opened(folder) as two:
                assert two.check() == []
                assert two.find(ids).length == 0
            original(*paths)

        monkeypatch.setattr(os, "rename", open_another)
        put(one, ids)
        assert assert_right(one, ids).length == 300


def test_threads_share_a_store(store):
    conversations = [tokens(900, seed) for seed in range(8)]
    errors: list[BaseException] = []

    def work(mine: int) -> None:
        try:
            for ids in conversations[mine:] + conversations[:mine]:
                turns(store, ids, 400, 900)
                store.write_checkpoint(ids, snapshot(ids))
                store.pin(f"thread {mine}", [ids])
                assert assert_right(store, ids).length == 900
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(mine,)) for mine in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert (store.stats().runs, store.stats().checkpoints) == (16, 8)
    assert store.check() == []
