"""Replies that follow a grammar: alone, in batches, with drafts, and after failures."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from mlxcache.engine.engine import COMPILE_THREADS, Engine
from mlxcache.errors import BadRequest, Busy, GenerationFailed
from mlxcache.model.guidance import guide
from mlxcache.model.guidance.grammar import Guides
from mlxcache.model.guidance.guide import Guide
from mlxcache.model.lark import LONGEST_GRAMMAR
from mlxcache.types import Job, OutputFormat
from tests.conftest import ToyMaker
from tests.engine.guided import POINT, SCHEMAS, as_format, ask
from tests.engine.running import started


@pytest.fixture
async def engine(toy_llama: Path, tmp_path: Path) -> AsyncIterator[Engine]:
    async with started(toy_llama, tmp_path) as running:
        yield running


async def test_complete_replies_are_valid_alone_and_in_a_batch(engine: Engine) -> None:
    """The same seed gives the same text alone and beside others, each with a schema of its own."""
    asked = [(as_format(schema), f"say {i}") for i, schema in enumerate(SCHEMAS)]
    together = await asyncio.gather(*(ask(engine, *one) for one in asked))
    for schema, one, reply in zip(SCHEMAS, asked, together, strict=True):
        assert reply.end.reason == "stop"
        jsonschema.validate(json.loads(reply.text), schema)
        assert (await ask(engine, *one)).text == reply.text


async def test_each_kind_of_format(engine: Engine) -> None:
    choice = await ask(engine, OutputFormat("choice", '["yes", "no"]'))
    assert choice.text in ("yes", "no")
    regex = await ask(engine, OutputFormat("regex", "[a-z]{3}-[0-9]{2}"))
    assert re.fullmatch("[a-z]{3}-[0-9]{2}", regex.text)
    grammar = await ask(engine, OutputFormat("grammar", 'start: "a" ("," "b")~3 "."'))
    assert grammar.text == "a,b,b,b."
    anything = await ask(engine, OutputFormat("json_object"), tokens=60)
    assert anything.text.startswith("{")


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (OutputFormat("json_schema", '{"type": "number", "multipleOf": "x"}'), "at /multipleOf"),
        (OutputFormat("grammar", "start: nothing"), "unknown name"),
        (OutputFormat("regex", "(a"), "unclosed group"),
    ],
)
async def test_a_format_that_cannot_be_compiled_is_refused(
    engine: Engine, form: OutputFormat, why: str
) -> None:
    with pytest.raises(BadRequest, match=why):
        await ask(engine, form)
    (record,) = engine.requests()
    assert record.status == "rejected"


async def test_a_grammar_that_waits_for_others_is_not_blamed(
    toy_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that take too long are told so; the one behind them, to come again.

    Prompts are rendered in worker threads, so any of them may come last.
    """
    release, make = threading.Event(), Guides.make

    def slow(self: Guides, job: Job) -> Guide | None:
        release.wait(30)
        return make(self, job)

    monkeypatch.setattr(Guides, "make", slow)
    monkeypatch.setattr("mlxcache.engine.engine.COMPILE_S", 1.0)
    async with started(toy_llama, tmp_path) as engine:
        asked = (ask(engine, as_format(POINT), str(i)) for i in range(COMPILE_THREADS + 1))
        errors = await asyncio.gather(*asked, return_exceptions=True)
        release.set()
        assert Counter(map(type, errors)) == {BadRequest: COMPILE_THREADS, Busy: 1}


async def test_a_format_too_complex_to_follow_is_the_requests_error(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """It is noticed while the reply is generated, whose KV stays; no failure of the server."""
    form = OutputFormat("regex", "(a{1000}){1000}", "guided_regex")
    with pytest.raises(BadRequest, match="guided_regex is too complex") as caught:
        await ask(engine, form)
    assert caught.value.param == "guided_regex"
    assert (await ask(engine, as_format(POINT))).end.cached_tokens > 0
    record = engine.requests()[-1]
    assert (record.status, record.error) == ("failed", str(caught.value))
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


def chain(count: int) -> dict[str, Any]:
    """A schema whose definitions refer to each other, one after another."""
    links = {
        f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "string"}}}


RULES = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(4000))


@pytest.mark.parametrize(
    "form",
    [as_format(chain(1500)), OutputFormat("grammar", f'start: r0\n{RULES}\nr4000: "b"')],
    ids=["schema", "rules"],
)
async def test_a_format_of_a_thousand_nested_definitions_does_not_end_the_server(
    engine: Engine, form: OutputFormat
) -> None:
    """The compiler calls itself for each of them, in a thread whose stack has room for it."""
    assert (await ask(engine, form, tokens=8)).end.generated_tokens > 0
    assert (await ask(engine, as_format(POINT))).end.reason == "stop"


async def test_a_format_that_is_too_long_is_refused(engine: Engine) -> None:
    for form in (
        as_format({"enum": ["a" * LONGEST_GRAMMAR]}),
        OutputFormat("regex", "a" * LONGEST_GRAMMAR),
    ):
        with pytest.raises(BadRequest, match="characters, at most"):
            await ask(engine, form)


async def test_the_vocabulary_is_read_once_and_not_before_the_server_is_ready(
    toy_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes while it is read waits for it."""
    begun, release, reads = threading.Event(), threading.Event(), []

    def slow(*args: Any, **options: Any) -> LLTokenizer:
        begun.set()
        assert release.wait(30)
        reads.append(threading.current_thread())
        return LLTokenizer(*args, **options)

    monkeypatch.setattr(guide, "LLTokenizer", slow)
    async with started(toy_llama, tmp_path) as engine:
        assert engine.state == "ready"
        assert await asyncio.to_thread(begun.wait, 30)
        asked = asyncio.ensure_future(ask(engine, as_format(POINT)))
        await asyncio.sleep(0.05)
        release.set()
        jsonschema.validate(json.loads((await asked).text), POINT)
        assert len(reads) == 1


async def test_nobody_can_tell_from_the_work_which_formats_others_use(
    toy_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A format that was used before is compiled as often as a new one."""
    compiled: list[str] = []

    def counted(vocabulary: LLTokenizer, grammar: str, **options: Any) -> LLMatcher:
        compiled.append(grammar)
        return LLMatcher(vocabulary, grammar, **options)

    monkeypatch.setattr(guide, "LLMatcher", counted)
    async with started(toy_llama, tmp_path) as engine:
        for _ in range(2):
            await ask(engine, as_format(POINT))
    assert len(compiled) == 2


async def test_an_unexpected_error_of_the_compiler_ends_the_request_alone(
    toy_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A panic of its Rust code is no Exception."""

    class Panic(BaseException):
        pass

    def panic(*_: object) -> None:
        raise Panic("index out of bounds")

    monkeypatch.setattr(LLMatcher, "compute_bitmask", panic)
    async with started(toy_llama, tmp_path) as engine:
        with pytest.raises(GenerationFailed, match="Compiling the grammar failed: Panic"):
            await ask(engine, as_format(POINT))
        (record,) = engine.requests()
        assert record.status == "rejected"


async def test_thinking_is_free_until_it_ends(toy: ToyMaker, tmp_path: Path) -> None:
    """The schema binds the answer alone; without thinking it binds all of the reply."""
    model = toy("llama", thinking=True, emits={"</think>": 20})
    async with started(model, tmp_path) as engine:
        for seed in range(3):
            reply = await ask(engine, as_format(POINT), seed=seed, temperature=0.7)
            assert reply.thinking
            assert reply.end.reason == "stop"
            assert reply.end.reasoning_tokens > 0
            jsonschema.validate(json.loads(reply.text), POINT)
        reply = await ask(engine, as_format(POINT), thinking=False)
        assert not reply.thinking
        jsonschema.validate(json.loads(reply.text), POINT)
