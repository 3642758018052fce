"""A runtime that cannot be made leaves nothing open."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxcache.config import Settings
from mlxcache.config.sizes import LEAST_RAM
from mlxcache.engine.opening import demo_spec
from mlxcache.engine.runtime import ModelRuntime
from mlxcache.errors import ModelError, StoreError
from mlxcache.mlx_thread import MlxThread
from mlxcache.model.load import ModelSpec, load
from mlxcache.residency.memory import MIN_CONTEXT
from mlxcache.store.sessions import Sessions
from mlxcache.store.store import Store
from mlxcache.types import Job
from tests.engine.running import started


async def unasked(job: Job) -> None:
    raise AssertionError(job)


def make(path: Path, cache_dir: Path, ram: int = 400_000_000) -> ModelRuntime:
    settings = Settings(model=str(path), cache_dir=cache_dir, ram=ram, disk=1_000_000_000)
    return ModelRuntime(load(ModelSpec(str(path))), settings, MlxThread(), unasked)


def test_too_little_memory_is_found_before_the_disk_is_touched(
    toy_llama: Path, tmp_path: Path
) -> None:
    """The error names the least, and with that the model is served."""
    with pytest.raises(ModelError, match=r"--ram 4000000 .* set at least \d+MB$") as raised:
        make(toy_llama, tmp_path, ram=4_000_000)
    assert not list(tmp_path.iterdir())
    least = int(str(raised.value).rpartition(" ")[2].removesuffix("MB")) * 10**6
    served = make(toy_llama, tmp_path, ram=least)
    context = served.info.context_length
    served.close(died=False)
    assert MIN_CONTEXT <= context < 6 * MIN_CONTEXT


def test_the_least_memory_that_settings_name_is_enough_for_the_demo_model(tmp_path: Path) -> None:
    """So that following the advice of one error does not lead to the next."""
    settings = Settings(cache_dir=tmp_path, ram=4_000_000, disk=1_000_000_000)

    def least() -> int:
        with pytest.raises(ModelError, match=r"set at least \d+MB$") as raised:
            ModelRuntime(load(demo_spec(settings)), settings, MlxThread(), unasked)
        return int(str(raised.value).rpartition(" ")[2].removesuffix("MB"))

    # MLX's peak counts all threads: what an earlier test has left running can only raise it
    assert min(least() for _ in range(3)) <= int(LEAST_RAM.removesuffix("MB"))


def test_a_context_does_not_depend_on_whether_the_disk_can_be_used(
    toy_llama: Path, tmp_path: Path
) -> None:
    """A folder that cannot be made leaves the budget for copies unused."""
    (tmp_path / "file").touch()
    without = make(toy_llama, tmp_path / "file", ram=80_000_000)
    with_disk = make(toy_llama, tmp_path / "folder", ram=80_000_000)
    contexts = [each.info.context_length for each in (without, with_disk)]
    for each in (without, with_disk):
        each.close(died=False)
    assert contexts[0] == contexts[1]


def test_sessions_that_cannot_be_read_leave_no_store_open(
    toy_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores: list[Store] = []

    def refuse(sessions: Sessions, namespace: str) -> None:
        stores.append(Store.open(tmp_path / "store", namespace, None))
        raise StoreError("locked")

    monkeypatch.setattr(Sessions, "prefill_times", refuse)
    with pytest.raises(StoreError, match="locked"):
        make(toy_llama, tmp_path)
    (own,) = stores
    assert len(list((tmp_path / "store" / "locks").iterdir())) == 1
    own.close()


async def test_on_metal_the_device_s_limits_bound_the_budget_and_the_buffers(
    toy_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Three quarters of the working set that the weights leave, three quarters of the buffers."""
    working, buffers = 400_000_000, 499_000
    metal = {"max_recommended_working_set_size": working, "resource_limit": buffers}
    monkeypatch.setattr(mx, "device_info", lambda *_: metal)
    wired: list[int] = []
    monkeypatch.setattr(mx, "set_wired_limit", wired.append)
    caplog.set_level("INFO", "mlxcache")
    async with started(toy_llama, tmp_path, ram="auto", wire="100MB") as engine:
        assert engine.info is not None
        ram = engine.figures()["ram"]
        assert ram["limit_bytes"] == (working - engine.info.weights_bytes) * 3 // 4
        assert ram["buffer_limit"] == buffers * 3 // 4
    assert "three quarters" in caplog.text
    assert "that Metal may use here" in caplog.text
    assert wired == [100_000_000]
