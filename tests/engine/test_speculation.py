"""A server that checks guesses: its settings, what it measures, and what it says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcache.engine.figures import GUESSES
from mlxcache.engine.runtime import ModelRuntime
from mlxcache.guess.rule import LENGTHS, PassCosts
from mlxcache.model import kv
from mlxcache.prompt.builder import ResultForms
from mlxcache.scheduling.short_passes import load_passes, measure_passes, save_passes
from mlxcache.types import Chat, Finished, Job, Sampling, Tokens, token_ids
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
    curves = measure_passes(bench.model, bench.kv.layout, 1 << 22)
    assert len(curves) == 2
    for points in curves.values():
        assert {tokens for tokens, _ in points} <= set(LENGTHS)
        assert {1, 2, 4, 8, 16, 32} <= dict(points).keys()
        assert points == sorted(points)
        assert all(seconds > 0 for _, seconds in points)
    assert PassCosts(curves).at(1000)(9) >= 1


def test_measurements_are_kept_for_later_starts(tmp_path: Path) -> None:
    """By model and machine; a file that cannot be read is measured again."""
    file, curves = tmp_path / "passes.json", {256: [(1, 0.1), (2, 0.15)], 4096: [(1, 0.2)]}
    assert load_passes(file, "a") is None
    save_passes(file, "a", curves)
    save_passes(file, "b", {256: [(1, 0.3)]})
    assert load_passes(file, "a") == curves
    assert load_passes(file, "b") == {256: [(1, 0.3)]}
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text("[1, 2")
    assert load_passes(file, "a") is None
    save_passes(file, "a", curves)
    assert load_passes(file, "a") == curves
    for number in range(60):
        save_passes(file, f"m{number}", curves)
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
    monkeypatch.setattr("mlxcache.engine.runtime.measure_passes", lambda *_: CHEAP_CURVES)
    path, more = toy_paths["llama"], {"ram": "1GB", "disk": "1GB", "speculate": "auto"}
    async with started(path, tmp_path, **more) as engine:
        runtime = engine._runtime
        assert isinstance(runtime, ModelRuntime)
        assert runtime.speculation is not None
        replies = []
        for number, speculate in enumerate((True, True, False)):
            chat = Chat(
                [
                    {"role": "user", "content": "Read it."},
                    {"role": "tool", "content": NUMBERED, "tool_call_id": "c1"},
                ]
            )
            prompt = await engine.render(chat)
            job = Job(
                f"r{number}", prompt, Sampling(), max_tokens=48, speculate=speculate, api="chat"
            )
            stream = await engine.submit(job)
            events = [event async for event in stream]
            assert isinstance(events[-1], Finished)
            record = stream.record
            replies.append((runtime.builders, record, events))
        records = [record for _, record, _ in replies]
        assert records[1].accepted_tokens > 20
        assert records[1].guess_passes < 12
        assert records[2].drafted_tokens == 0
        texts = ["".join(getattr(e, "text", "") for e in events) for _, _, events in replies]
        assert texts[0] == texts[1] == texts[2]
        figures = engine.figures()
        counted = figures["guesses"]
        for name, field in GUESSES.items():
            total = sum(getattr(record, field) for record in records)
            assert counted[name]["history"] == pytest.approx(total)
            assert counted[name]["draft"] == 0
        assert [record.guess_source for record in records[1:]] == ["history", None]
        await runtime.book.writer.written()
        sessions = [one.figures for one in await engine.sessions.list()]
        assert sum(one.accepted_tokens for one in sessions) == counted["accepted"]["history"]
        assert sum(one.guess_passes for one in sessions) == counted["passes"]["history"]
        assert figures["tokens"]["accepted"] >= records[1].accepted_tokens
        assert (tmp_path / "passes.json").exists()


def test_the_layouts_that_can_be_rewound(toy_paths: dict[str, Path]) -> None:
    """All but chunks and rings."""
    assert all(kv.survey(Bench(path).model).rewinds for path in toy_paths.values())
