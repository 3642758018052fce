"""`mlxcache.embed` serves a model inside a program, without HTTP."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from mlxcache.embed import Model, Models
from mlxcache.errors import BadRequest, ConfigError, NotFound
from mlxcache.mlx_thread import MlxThread
from mlxcache.store.lock import InUse, exclusive_lock
from mlxcache.types import Finished
from tests.conftest import ToyMaker

HELLO = [{"role": "user", "content": "Say something about a cache. " * 20}]

IMPORT_EMBED = """
import sys
import mlxcache.embed
unused = {"starlette", "sse_starlette", "uvicorn", "obstore", "cryptography"}
print(*sorted({*unused, "h11"} & set(sys.modules)))
mlxcache.embed.Model()
print(*sorted(unused & set(sys.modules)))
"""


def test_importing_embed_loads_no_http_server():
    """A program that embeds the engine has no use for one, nor for a remote's without one."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EMBED], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


def test_an_unknown_setting_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match="'rams'"):
        Model(ram="1GB", rams="2GB")
    with pytest.raises(ConfigError, match="--ram"):
        Model(ram="much")


def test_outside_of_async_with_there_is_no_model():
    with pytest.raises(RuntimeError, match="async with"):
        Model().info  # noqa: B018 - it is the look that raises


def test_an_engine_that_cannot_be_made_leaves_no_remote_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The thread of the remote ends with the error, and the error is the engine's own."""

    def fail(*_: object, **__: object) -> None:
        names = [one.name for one in threading.enumerate()]
        assert "mlxcache-remote" in names
        raise ConfigError("no engine")

    monkeypatch.setattr("mlxcache.engine.engine.Engine.__init__", fail)
    (tmp_path / "shared").mkdir()
    with pytest.raises(ConfigError, match="no engine"):
        Model(remote=f"file://{tmp_path}/shared", cache_dir=str(tmp_path / "cache"))
    assert "mlxcache-remote" not in [one.name for one in threading.enumerate()]


async def test_turns_are_warm_cancelled_ones_are_kept_and_the_folder_is_held(
    toy_llama: Path, tmp_path: Path
):
    folder = tmp_path / "cache"
    async with Model(str(toy_llama), cache_dir=str(folder), ram="200MB") as model:
        with pytest.raises(InUse), exclusive_lock(folder):
            pass
        first = await model.chat(HELLO, max_tokens=8, temperature=0, session="one")
        assert first.cached_tokens < first.prompt_tokens
        assert (first.generated_tokens, first.finish_reason) == (8, "length")
        again = await model.chat(HELLO, max_tokens=8, temperature=0, session="one")
        assert again.cached_tokens == again.prompt_tokens - 1
        assert again.text == first.text

        stream = await model.stream(HELLO, max_tokens=500, session="two" * 100)
        async with stream:
            async for event in stream:
                assert not isinstance(event, Finished)
                break
        with pytest.raises(BadRequest, match="temperature"):
            await model.chat(HELLO, temperature=9)
        with pytest.raises(BadRequest, match="structural_tag"):
            await model.chat(HELLO, structural_tag="{}")
        chosen = await model.chat(HELLO, structured_outputs={"choice": ["yes", "no"]})
        assert chosen.text in ("yes", "no")
        with pytest.raises(BadRequest, match="`n`: 1"):
            await model.chat(HELLO, n=2)
        listed = await model.sessions.list(10)
        labels = {one.as_object()["label"] for one in listed}
        assert {"one", ("two" * 100)[:200]} <= labels
        with pytest.raises(NotFound):
            await model.sessions.get("ses_none")
        assert model.figures()["requests"]["total"] >= 2
    with exclusive_lock(folder):
        pass
    await model.close()  # a second time


async def test_several_models_share_a_process(toy: ToyMaker, tmp_path: Path) -> None:
    """Named as in a server's settings; each has its own sessions, and is warm after an unload."""
    tables = {
        "large": {"path": str(toy("llama")), "aliases": ["big"]},
        "small": {"path": str(toy("qwen3_5"))},
    }
    more: dict[str, Any] = {"ram": "200MB", "cache_dir": str(tmp_path / "cache")}
    routes = {"claude-haiku-*": "small"}
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "session": "one"}
    async with Models(models=tables, route=routes, **more) as models:
        assert [one["state"] for one in models.describe()] == ["loaded", "never"]
        replies = {name: await models.chat(HELLO, model=name, **fields) for name in tables}
        assert replies["large"].text != replies["small"].text
        await models.unload("small")
        again = await models.chat(HELLO, model="claude-haiku-9", **fields)
        assert again.text == replies["small"].text
        assert again.cached_tokens > again.prompt_tokens - 64
        named = {one.session.model: one.session.turns for one in await models.sessions.list()}
        assert named == {"large": 1, "small": 2}
        assert models.figures()["requests"]["total"] == 3
        await models.load("big")
        with pytest.raises(NotFound, match="large, small"):
            await models.load("tiny")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc has the threads of the system")
def test_no_thread_of_mlx_outlives_its_join() -> None:
    for _ in range(30):
        thread = MlxThread()
        thread.start()
        native = thread.call(threading.get_native_id).result()
        thread.end()
        thread.join(10)
        assert not Path(f"/proc/self/task/{native}").exists()
