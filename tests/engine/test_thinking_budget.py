"""A thinking budget ends the thinking, the answer follows, and the next turn is warm."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.config import Settings
from mlxcache.engine.engine import Engine
from mlxcache.engine.runtime import ModelRuntime
from mlxcache.guess.rule import Passes
from mlxcache.model.guidance.thinking import ThinkingBudget, read_closing
from mlxcache.model.load import Loaded
from mlxcache.model.output import OutputParser
from mlxcache.model.sampling import make_sampler
from mlxcache.residency.memory import Shared
from mlxcache.scheduling import loop_guard
from mlxcache.scheduling.decoder import DecoderRow
from mlxcache.scheduling.task import Output, Task
from mlxcache.types import Chat, Finished, Job, OutputFormat, Sampling, Text, Thinking, ToolChoice
from tests.engine.running import settled
from tests.model.test_output import THINK, wrapped
from tests.scheduling.guesses import CHEAP_CURVES

TOKENS = 70

HARMONY_TEMPLATE = """\
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if loop.last and m.reasoning_content -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' -}}
{%- else -%}
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""


@dataclass(frozen=True)
class Family:
    """A toy's marks by the family's, text replaced in its template, and how a reply begins."""

    marks: Mapping[str, str]
    template: str | Mapping[str, str]
    begins: str = ""


FAMILIES = {
    "think": Family({}, {}),
    "channel": Family(
        {"<think>": "<|channel>", "</think>": "<channel|>"},
        {"<think>": "<|channel>thought", "</think>": "<channel|>"},
    ),
    "harmony": Family(
        {
            **{"<think>": "<|channel|>", "</think>": "<|message|>"},
            **{"<tool_call>": "<|start|>", "</tool_call>": "<|end|>"},
            **{"<tool_response>": "<|return|>", "</tool_response>": "<|call|>"},
        },
        HARMONY_TEMPLATE,
        "<|channel|>analysis<|message|>",
    ),
}

_OPENS, _CLOSES = "{{- '<think>\\\\n' -}}", "{{- '\\\\n</think>\\\\n\\\\n' -}}"
SWITCHLESS = {
    "opened": Family({}, {_CLOSES: ""}),
    "unopened": Family({}, {_OPENS: "", _CLOSES: ""}, "<think>"),
}
"""Families whose template does not know `enable_thinking`."""


class Begins:
    """A logits processor that makes a reply begin with `ids`."""

    def __init__(self, ids: list[int], prompt: int):
        self._ids, self._prompt = ids, prompt

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        at = tokens.shape[0] - self._prompt
        if at >= len(self._ids):
            return logits
        return logits + 1e4 * (mx.arange(logits.shape[-1])[None] == self._ids[at])


class BeginningRuntime(ModelRuntime):
    """A runtime whose replies begin with a text; the rest is the model's."""

    begins = ""

    def prepare_output(self, task: Task) -> Output:
        output = super().prepare_output(task)
        if not self.begins:
            return output
        ids = self.loaded.tokenizer.encode(self.begins, add_special_tokens=False)
        row = replace(
            output.row,
            processors=[Begins(ids, len(task.fed)), *output.row.processors],
            context=mx.array(task.fed[:-1]),
        )
        return replace(output, row=row)


class FamilyEngine(Engine):
    begins = ""

    def make_runtime(self, loaded: Loaded, shared: Shared | None = None) -> ModelRuntime:
        runtime = BeginningRuntime(loaded, self.settings, self._thread, self.submit)
        runtime.begins = self.begins
        return runtime


Maker = Callable[..., Path]


@pytest.fixture(scope="session")
def model(toy: Maker, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make the toy of a family."""

    def make(name: str) -> Path:
        family, source = (FAMILIES | SWITCHLESS)[name], toy("llama", thinking=True)
        folder = tmp_path_factory.mktemp(name) / "model"
        shutil.copytree(source, folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            text = (folder / file).read_text()
            renamed = family.marks if file == "tokenizer.json" else family.template
            for ours, theirs in renamed.items() if isinstance(renamed, Mapping) else ():
                text = text.replace(ours, theirs)
            (folder / file).write_text(text)
        if isinstance(family.template, str):
            (folder / "chat_template.jinja").write_text(family.template)
        return folder

    return make


@asynccontextmanager
async def running(name: str, path: Path, cache: Path, **more: Any) -> AsyncIterator[Engine]:
    given: dict[str, Any] = {"ram": "300MB", "disk": "off"} | more
    engine = FamilyEngine(Settings(model=str(path), cache_dir=cache, **given))
    engine.begins = (FAMILIES | SWITCHLESS)[name].begins
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


Said = tuple[str, str, Finished]


async def ask(
    engine: Engine, messages: list[dict[str, Any]], id: str, budget: int | None, **more: Any
) -> Said:
    """Thinking, text and end of a reply."""
    args = more.pop("template_args", {})
    prompt = await engine.render(Chat(messages, template_args=args))
    limits: dict[str, Any] = {"max_tokens": TOKENS} | more
    job = Job(id, prompt, thinking_budget=budget, **limits)
    events = [event async for event in await engine.submit(job)]
    thinking = "".join(e.text for e in events if isinstance(e, Thinking))
    text = "".join(e.text for e in events if isinstance(e, Text))
    assert isinstance(events[-1], Finished)
    return thinking, text, events[-1]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_budget_is_kept_and_the_turn_after_is_warm(
    name: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Within 8 tokens, alone and in a batch; what is said is true, and no marker shows."""
    first = [user("Tell me about trees. " * 20)]
    async with running(name, model(name), tmp_path) as engine:
        _, _, free = await ask(engine, first, "free", None)
        assert free.reasoning_tokens > 60  # it would never end by itself
        budgets = (0, 5, 30)
        said = [await ask(engine, first, f"alone{n}", n) for n in budgets]
        asked = (ask(engine, first, f"batch{n}", n) for n in budgets)
        together = await asyncio.gather(*asked, ask(engine, first, "beside", None))
        assert [(a, b) for a, b, _ in together[:-1]] == [(a, b) for a, b, _ in said]
        assert together[-1][2].reasoning_tokens == free.reasoning_tokens
        for budget, (thinking, text, last) in zip(budgets, said, strict=True):
            assert budget - 8 <= last.reasoning_tokens <= budget + 8
            assert text
            assert not any(mark in thinking + text for mark in ("think", "<|", "|>", "analysis"))
            assert last.generated_tokens == TOKENS
        thinking, text, last = said[-1]
        reply = {"role": "assistant", "content": text, "reasoning_content": thinking}
        for reasoning in (True, False):
            kept = reply if reasoning else {"role": "assistant", "content": text}
            await ask(engine, first, f"again{reasoning}", 30)
            await settled(engine)
            turn = [*first, kept, user("And then?")]
            _, _, after = await ask(engine, turn, f"next{reasoning}", 30, max_tokens=4)
            new = after.prompt_tokens - last.prompt_tokens - last.generated_tokens
            assert after.prompt_tokens - after.cached_tokens <= max(0, new) + 64


async def test_limits_templates_and_seeds(model: Callable[[str], Path], tmp_path: Path) -> None:
    """max_tokens ends thinking too; a closed block needs no budget; a seed draws the same."""
    first = [user("Tell me about trees.")]
    async with running("think", model("think"), tmp_path) as engine:
        _, text, last = await ask(engine, first, "short", 60, max_tokens=30)
        assert (last.reason, last.generated_tokens, text) == ("length", 30, "")
        args = {"enable_thinking": False}
        _, free, _ = await ask(engine, first, "off", None, template_args=args)
        _, limited, last = await ask(engine, first, "off0", 0, template_args=args)
        assert (limited, last.reasoning_tokens) == (free, 0)
        hot = Sampling(temperature=1.0, seed=5, repetition_penalty=1.1)
        whole, _, _ = await ask(engine, first, "hot", None, sampling=hot)
        part, _, last = await ask(engine, first, "hot40", 40, sampling=hot)
        assert part
        assert whole.startswith(part.rstrip("\n"))
        assert (await ask(engine, first, "hot40again", 40, sampling=hot))[0] == part
        probs = [
            e.logprobs
            async for e in await engine.submit(
                Job("p", await engine.render(Chat(first)), thinking_budget=9, max_tokens=20,
                    top_logprobs=1)
            )
            if isinstance(e, Text)
        ]  # fmt: skip
        assert sum(map(len, probs)) == 20


@pytest.mark.parametrize("name", SWITCHLESS)
async def test_thinking_that_is_off_is_off_whatever_the_template_does(
    name: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    """In a free reply, and in front of a forced call."""
    first = [user("Tell me about trees.")]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    forced: dict[str, Any] = {"tools": (tool,), "tool_choice": ToolChoice(required=True)}
    async with running(name, model(name), tmp_path) as engine:
        _, _, free = await ask(engine, first, "free", None)
        assert free.reasoning_tokens > 60
        for id, more in (("off", {}), ("forced", forced)):
            thinking, text, last = await ask(engine, first, id, 0, **more)
            assert last.reasoning_tokens <= (0 if name == "unopened" else 4)
            assert not thinking.strip()
            assert text or last.reason == "tool_calls"


async def test_a_draft_keeps_the_budget(
    model: Callable[[str], Path], toy: Maker, tmp_path: Path
) -> None:
    """The reply begins as without a draft, and its thinking ends within the drafts' reach."""
    first, path = [user("Tell me about trees.")], model("think")
    draft = toy("llama", thinking=True, seed=1)
    async with running("think", path, tmp_path, draft_model=str(draft)) as engine:
        for budget in (0, 30):
            _, text, last = await ask(engine, first, f"{budget}", budget)
            assert budget - 8 <= last.reasoning_tokens <= budget + 8
            assert text
            assert last.generated_tokens == TOKENS


async def test_guesses_are_checked_after_thinking_that_is_off(
    model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxcache.engine.runtime.measure_passes", lambda *_: Passes(CHEAP_CURVES))
    first, path = [user("Tell me about trees.")], model("think")
    said = []
    for speculate in ("off", "auto"):
        async with running("think", path, tmp_path, speculate=speculate) as engine:
            said += [(await ask(engine, first, f"{n}", 0, max_tokens=160))[1] for n in range(2)]
            assert (engine.figures()["tokens"]["accepted"] > 40) is (speculate == "auto")
    assert len(set(said)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_guesses_change_nothing_of_a_budget(
    model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    temperature: float,
) -> None:
    """The guide that ends the thinking applies to the same token, whatever was guessed."""
    monkeypatch.setattr("mlxcache.engine.runtime.measure_passes", lambda *_: Passes(CHEAP_CURVES))
    first, path = [user("Tell me about trees.")], model("think")
    hot = Sampling(temperature=temperature, seed=5)
    limits = {"max_tokens": 240, "sampling": hot}
    said: list[list[tuple[str, str, int]]] = []
    for speculate in ("off", "auto"):
        async with running("think", path, tmp_path, speculate=speculate) as engine:
            replies = [
                await ask(engine, first, f"{budget}-{time}", budget, **limits)
                for time in range(2)
                for budget in (None, 0, 30, 150)
            ]
            said.append([(a, b, end.reasoning_tokens) for a, b, end in replies])
            accepted = engine.figures()["tokens"]["accepted"]
            assert (accepted > 200) is (speculate == "auto")
    assert said[0] == said[1]


@pytest.mark.parametrize("name", FAMILIES)
async def test_a_format_follows_thinking_that_its_budget_ended(
    name: str, model: Callable[[str], Path], tmp_path: Path
) -> None:
    """The grammar sees the closing words too, and then has the answer to itself."""
    first = [user("Are trees green?")]
    choice = OutputFormat("choice", '["yes, they are", "no"]')
    async with running(name, model(name), tmp_path) as engine:
        for budget in (0, 30):
            thinking, text, last = await ask(engine, first, f"{budget}", budget, format=choice)
            assert text in ("yes, they are", "no")
            assert last.reason == "stop"
            assert budget - 8 <= last.reasoning_tokens <= budget + 8
            assert len(thinking) > 20 or not budget


async def test_a_loop_in_thinking_ends_the_thinking_first(
    model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer follows; if that is a loop too, the reply is over."""
    monkeypatch.setattr(loop_guard, "_REQUIRED", loop_guard._REQUIRED // 20)  # to be quick
    stuck = Sampling(logit_bias=((50, 100.0),))
    async with running("think", model("think"), tmp_path) as engine:
        thinking, text, last = await ask(
            engine, [user("Hi")], "r", None, sampling=stuck, max_tokens=300
        )
        assert last.reason == "repetition"
        assert 64 <= last.reasoning_tokens < 80
        assert len(set(thinking)) == len(set(text)) == 1
        assert last.generated_tokens < 160


def test_a_reply_that_begins_again_is_closed_at_the_same_place() -> None:
    """After an error of the device the tokens so far are replayed; the closing goes on."""
    tokenizer = wrapped(None, THINK)
    closing = read_closing(tokenizer, "llama", 608)
    assert closing is not None
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    for written in range(1, len(closing.plain)):
        budget = ThinkingBudget(closing, tokenizer, 10, tools=False)
        row = DecoderRow(make_sampler(Sampling(), 608), (), None)
        output = Output(OutputParser(tokenizer, thinking_open=True), row, budget=budget)
        output.replay([*[a] * 8, *closing.plain[:written]])
        row.apply_steering()
        assert row.guide is not None
        mask = row.guide.mask()
        assert mask is not None
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert allowed.tolist() == [closing.plain[written]]
