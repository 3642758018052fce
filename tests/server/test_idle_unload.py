"""Idle models are unloaded: what the process holds then, and that the next turn is warm."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlxcache.config.memory import read_footprint
from tests.conftest import ToyMaker
from tests.served import served
from tests.server.api import CHAT, Api, until, user, words

pytestmark = pytest.mark.slow

NEW = 64
"""Tokens that a warm turn may feed besides its new ones."""

MOST_LEFT = 300_000_000
"""Bytes by which a server with unloaded models may exceed an empty one."""


@pytest.fixture(scope="module")
def paths(toy: ToyMaker) -> dict[str, Path]:
    """Two models with 310 MB of weights and 256 KiB of KV a token."""
    wide = {"heads": 64, "kv_heads": 64, "head_dim": 128, "intermediate": 90_000}
    return {"one": toy("llama", **wide), "two": toy("llama", seed=7, **wide)}


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Footprint of a server of the demo that answered one request, in bytes."""
    with served("--ram", "1GB", home=tmp_path_factory.mktemp("empty")) as server:
        api = Api(server)
        assert ask(api, "", [user("Hello.")])["fed_tokens"]
        time.sleep(1)
        return read_footprint(server.process.pid)


def arguments(paths: dict[str, Path], folder: Path, *names: str) -> tuple[str, ...]:
    """Command line of a server of the models `names`, with a config file if several."""
    if len(names) == 1:
        return ("--model", str(paths[names[0]]))
    file = folder / "config.toml"
    file.write_text("\n".join(f'[models.{name}]\npath = "{paths[name]}"\n' for name in names))
    return ("--config", str(file))


def ask(api: Api, model: str, messages: list[Any], tokens: int = 8) -> dict[str, Any]:
    """Ask for a reply and append it to `messages`; return the record of the request."""
    body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0}
    response = api.post(CHAT, body)
    assert response.status_code == 200, response.text
    messages.append(response.json()["choices"][0]["message"])
    return api.record(response.headers["x-mlxcache-request"])


def unloads(api: Api) -> int:
    """Models that were unloaded so far for being idle."""
    return api.served.output.count("unloaded: idle for")


def _unloaded(api: Api, expected: int) -> bool:
    return unloads(api) >= expected


def new_tokens(record: dict[str, Any], before: dict[str, Any]) -> int:
    """Tokens of a turn's prompt that follow the turn before."""
    return int(record["prompt_tokens"] - before["prompt_tokens"] - before["generated_tokens"])


@pytest.mark.parametrize("names", [("one",)])
def test_the_memory_of_idle_models_is_given_back(paths, tmp_path, empty, names):
    flags = arguments(paths, tmp_path, *names)
    with served(*flags, "--ram", "1.8GB", "--idle-unload", "2s", home=tmp_path) as server:
        api, pid = Api(server), server.process.pid
        talks: dict[str, list[Any]] = {name: [user(words(3, 160))] for name in names}
        before: dict[str, Any] = {}
        for turn in range(3):
            for name, talk in talks.items():
                record = ask(api, name, talk)
                if turn:
                    assert record["fed_tokens"] <= new_tokens(record, before[name]) + NEW
                    assert record["restored_tokens"] > 400, "it was not warm from disk"
                before[name] = record
                talk.append(user(words(100 + turn, 20)))
            loaded = read_footprint(pid)
            kv = sum(one["prompt_tokens"] for one in before.values()) << 18
            assert kv > len(names) * 100_000_000
            expected = (turn + 1) * len(names)
            until(partial(_unloaded, api, expected), 30, lambda: server.output)
            until(
                lambda: read_footprint(pid) <= empty + MOST_LEFT,
                10,
                lambda: f"{read_footprint(pid):,} bytes",
            )
            print(
                f"\n{names} turn {turn}: {loaded / 1e6:.0f} MB loaded, "
                f"{read_footprint(pid) / 1e6:.0f} MB unloaded, {empty / 1e6:.0f} MB empty"
            )
