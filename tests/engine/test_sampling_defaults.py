"""What chooses and ends the tokens of a reply: a model's defaults, the flags, lists of tokens."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxcache.engine.engine import Engine
from mlxcache.scheduling import loop_guard
from mlxcache.types import DEFAULTED, Finished, Job, Prompt, Sampling, Text, token_ids
from tests.engine.running import started

UNSET = frozenset(DEFAULTED)


@pytest.fixture(scope="module")
def model(toy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy whose makers want it greedy, with a penalty and an end token of its own."""
    folder = tmp_path_factory.mktemp("model") / "own"
    shutil.copytree(toy("llama"), folder)
    own = {"do_sample": False, "repetition_penalty": 1.4, "top_k": "many", "eos_token_id": [500]}
    (folder / "generation_config.json").write_text(json.dumps(own))
    return folder


async def reply(engine: Engine, id: str, sampling: Sampling, *, tokens: int = 30) -> list[str]:
    prompt = Prompt(token_ids(range(10, 60)))
    job = Job(id, prompt, sampling, max_tokens=tokens, raw=True)
    events = [event async for event in await engine.submit(job)]
    assert isinstance(events[-1], Finished)
    return [event.text for event in events if hasattr(event, "text")]


async def test_the_models_defaults_apply_to_what_a_request_leaves_out(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with started(model, tmp_path) as engine:
        assert engine.info is not None
        assert engine.info.sampling == {"temperature": 0.0, "repetition_penalty": 1.4}
        assert f"model {model.name}: sampling defaults: temperature 0, repetition_penalty 1.4" in (
            caplog.text
        )
        left_out = await reply(engine, "a", Sampling(temperature=1.0, unset=UNSET))
        assert left_out == await reply(engine, "b", Sampling(repetition_penalty=1.4))
        stated = Sampling(unset=UNSET - {"repetition_penalty"})
        assert await reply(engine, "c", stated) == await reply(engine, "d", Sampling())
        assert left_out != await reply(engine, "e", Sampling())


async def test_flags_switch_the_defaults_and_the_loop_guard_off(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the API's defaults apply, and a reply may repeat itself to its limit."""
    monkeypatch.setattr(loop_guard, "_REQUIRED", loop_guard._REQUIRED // 50)
    flags = {"no_generation_config": True, "no_loop_guard": True}
    async with started(model, tmp_path, **flags) as engine:
        assert engine.info is not None
        assert engine.info.sampling == {}
        left_out = Sampling(temperature=1.0, seed=4, unset=UNSET)
        assert await reply(engine, "a", left_out) == (
            await reply(engine, "b", Sampling(temperature=1.0, seed=4))
        )
        await reply(engine, "stuck", Sampling(logit_bias=((50, 100.0),)), tokens=70)
        record = await engine.request("stuck")
        assert record is not None
        assert (record.finish_reason, record.generated_tokens) == ("length", 70)


async def test_a_reply_draws_allowed_tokens_and_ends_at_stop_tokens(toy, tmp_path: Path) -> None:
    async def drawn(engine: Engine, id: str, **fields: Any) -> list[int]:
        job = Job(id, Prompt(token_ids(range(10, 60))), Sampling(**fields), max_tokens=30, raw=True)
        stream = await engine.submit(replace(job, top_logprobs=0))
        pieces = [event async for event in stream if isinstance(event, Text)]
        return [entry.token_id for piece in pieces for entry in piece.logprobs]

    async with started(toy("llama"), tmp_path) as engine:
        plain = await drawn(engine, "plain")
        stop = plain[8]
        until = plain.index(stop) + 1
        assert await drawn(engine, "stop", stop_tokens=(stop,)) == plain[:until]
        record = await engine.request("stop")
        assert record is not None
        assert (record.finish_reason, record.generated_tokens) == ("stop", until)
        longer = await drawn(engine, "longer", stop_tokens=(stop,), min_tokens=until + 3)
        assert len(longer) > until + 3
        assert stop not in longer[: until + 3]
        allowed = tuple(plain[:3])
        assert set(await drawn(engine, "allowed", allowed_tokens=allowed)) <= set(allowed)
