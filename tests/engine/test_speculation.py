"""A server that checks guesses: its settings, what it measures, and what it says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxcache.engine.engine import Engine
from mlxcache.engine.runtime import ModelRuntime
from mlxcache.guess.rule import LENGTHS, PassCosts, Passes
from mlxcache.model import kv
from mlxcache.prompt.builder import ResultForms
from mlxcache.scheduling.short_passes import measure_passes, read_passes, save_passes
from mlxcache.types import Chat, Finished, Job, RequestRecord, Sampling, Tokens, token_ids
from tests.engine.running import started
from tests.scheduled import Bench
from tests.scheduling.guesses import CHEAP_CURVES

CODE = "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n"
NUMBERED = "\n".join(f"{n:6d}\t{line}" for n, line in enumerate(CODE.split("\n"), 1))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_passes_are_measured_on_the_model(toy_paths: dict[str, Path], family: str) -> None:
    """At two lengths of the context, and kept in a file."""
    bench = Bench(toy_paths[family])
    passes = measure_passes(bench.model, bench.kv.layout, 1 << 22)
    curves = passes.curves
    assert len(curves) == 2
    for points in curves.values():
        assert {tokens for tokens, _ in points} <= set(LENGTHS)
        assert {1, 2, 4, 8, 16, 32} <= dict(points).keys()
        assert points == sorted(points)
        assert all(seconds > 0 for _, seconds in points)
    assert PassCosts(curves).at(1000)(9) >= 1


def test_a_pass_gives_equal_bits_only_if_its_logits_and_its_kv_do(
    toy_paths: dict[str, Path],
) -> None:
    bench = Bench(toy_paths["llama"])

    def model(ids: mx.array, cache: Any) -> mx.array:
        """Rounds passes over 3 tokens otherwise, and the KV of passes over 5."""
        tokens = ids.shape[1]
        logits: mx.array = bench.model(ids, cache=cache)
        if tokens == 5:
            cache[0].keys = cache[0].keys * (1 + 1e-3)
        return logits * (1 + 1e-6) if tokens == 3 else logits

    plain = measure_passes(bench.model, bench.kv.layout, 1 << 22).equal
    assert measure_passes(model, bench.kv.layout, 1 << 22).equal == [
        n for n in plain if n not in (3, 5)
    ]


def test_measurements_are_kept_for_later_starts(tmp_path: Path) -> None:
    """By model and machine; a file that cannot be read is measured again."""
    file, other = tmp_path / "passes.json", Passes({256: [(1, 0.3)]})
    passes = Passes({256: [(1, 0.1), (2, 0.15)], 4096: [(1, 0.2)]}, [2, 4])
    assert not read_passes(file)
    save_passes(file, "a", passes)
    save_passes(file, "b", other)
    assert read_passes(file) == {"a": passes, "b": Passes(other.curves, [])}
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("[1, 2")
    assert not read_passes(file)
    save_passes(file, "a", passes)
    assert read_passes(file) == {"a": passes}
    for number in range(60):
        save_passes(file, f"m{number}", passes)
    assert len(file.read_bytes()) < 10_000


def test_forms_of_results_are_made_once_and_ahead() -> None:
    """Of results alone, and only where the form is another text."""
    made: list[str] = []

    def encode(text: str) -> Tokens:
        made.append(text)
        return token_ids(range(len(text)))

    forms = ResultForms(encode, escaped=True)
    messages = [{"role": "user", "content": NUMBERED}, {"role": "tool", "content": NUMBERED}]
    assert not forms.of(messages)
    forms.learn(messages)
    forms.learn([*messages, {"role": "tool", "content": "ok"}])
    assert made == [CODE.replace("\n", "\\n")]
    assert list(forms.of(messages)) == [NUMBERED]
    assert not forms.of(messages[:1])


async def test_a_server_checks_guesses_and_counts_them(
    toy_paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that was given before is given again in fewer passes, by the same tokens."""
    monkeypatch.setattr("mlxcache.engine.runtime.measure_passes", lambda *_: Passes(CHEAP_CURVES))
    path, more = toy_paths["llama"], {"ram": "1GB", "disk": "1GB", "speculate": "auto"}
    async with started(path, tmp_path, **more) as engine:
        runtime = engine._runtime
        assert isinstance(runtime, ModelRuntime)
        assert runtime.speculation is not None
        replies = []
        for number, speculate in enumerate((True, True, False)):
            replies.append(await asked(engine, f"r{number}", speculate=speculate))
        records = [record for record, _ in replies]
        assert records[1].accepted_tokens > 20
        assert records[1].guess_passes < 12
        assert records[2].drafted_tokens == 0
        assert len({text for _, text in replies}) == 1
        figures = engine.figures()
        counted = figures["guesses"]
        for name in ("drafted", "accepted", "passes", "saved_s"):
            total = sum(getattr(record.guesses["history"], name) for record in records)
            assert counted[name]["history"] == pytest.approx(total)
            assert counted[name]["draft"] == 0
        assert [record.guess_source for record in records[1:]] == ["history", None]
        await runtime.book.writer.written()
        sessions = [one.figures for one in await engine.sessions.list()]
        assert sum(one.accepted_tokens for one in sessions) == counted["accepted"]["history"]
        assert sum(one.guess_passes for one in sessions) == counted["passes"]["history"]
        assert figures["tokens"]["accepted"] >= records[1].accepted_tokens
        assert (tmp_path / "passes.json").exists()


async def test_exact_guesses_are_checked_only_in_passes_that_give_equal_bits(
    toy_paths: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = Passes(CHEAP_CURVES, [3])
    monkeypatch.setattr("mlxcache.engine.runtime.measure_passes", lambda *_: passes)
    more = {"ram": "1GB", "disk": "1GB", "speculate": "exact"}
    async with started(toy_paths["llama"], tmp_path, **more) as engine:
        assert engine.equal_passes == [3]
        await asked(engine, "r0")
        record, _ = await asked(engine, "r1")
        assert record.drafted_tokens == 2 * record.guess_passes > 20


async def asked(engine: Engine, id: str, *, speculate: bool = True) -> tuple[RequestRecord, str]:
    chat = Chat(
        [
            {"role": "user", "content": "Read it."},
            {"role": "tool", "content": NUMBERED, "tool_call_id": "c1"},
        ]
    )
    prompt = await engine.render(chat)
    job = Job(id, prompt, Sampling(), max_tokens=48, speculate=speculate, api="chat")
    stream = await engine.submit(job)
    events = [event async for event in stream]
    assert isinstance(events[-1], Finished)
    return stream.record, "".join(getattr(event, "text", "") for event in events)


def test_the_layouts_that_can_be_rewound(toy_paths: dict[str, Path]) -> None:
    """All but chunks and rings."""
    assert all(kv.survey(Bench(path).model).rewinds for path in toy_paths.values())
