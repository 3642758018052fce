"""A request that computed again what was computed before says where, why, and what it cost."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from mlxcache.cli.log import log_line
from mlxcache.engine.engine import Engine
from mlxcache.explain.compare import LEAST_LOSS
from mlxcache.types import Chat, Job, Progress, RequestRecord, Text, Thinking, ToolCall
from tests.engine.running import started
from tests.scripted import ScriptedRuntime

pytestmark = pytest.mark.asyncio(loop_scope="module")

Message = dict[str, Any]
Lost = dict[str, Any]
WORDS = ("the", "file", "path", "tool", "agent", "cache", "prefix", "model", "value", "edit")


def text(size: int, seed: str) -> str:
    rng = random.Random(seed)
    return "\n".join(" ".join(rng.choice(WORDS) for _ in range(9)) + "." for _ in range(size))


def system(line: str, seed: str) -> Message:
    return {"role": "system", "content": f"{text(4, seed)}\n{line}\n{text(20, seed + '2')}"}


def user(words: str) -> Message:
    return {"role": "user", "content": words}


def tool(name: str) -> Message:
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    function = {"name": name, "description": text(5, name), "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool(name) for name in ("Bash", "Edit", "Read")]


class Talk:
    def __init__(self, engine: Engine, session: str):
        self.engine, self.session, self.seed = engine, session, session
        self.messages: list[Message] = []
        self.tools: list[Message] = TOOLS

    def system(self, line: str = "Today's date is 2026-11-21.") -> Message:
        """A system message with a line that may change, of this conversation alone."""
        return system(line, self.seed)

    async def say(self, *messages: Message, tokens: int = 6) -> RequestRecord:
        """One turn; the reply goes into the history as a client would send it back."""
        self.messages += messages
        chat = Chat(list(self.messages), self.tools)
        prompt = await self.engine.render(chat, session=self.session)
        id = f"req_{time.monotonic_ns()}"
        reply = ""
        job = Job(id, prompt, max_tokens=tokens, session=self.session, tools=(), api="chat")
        async for event in await self.engine.submit(job):
            assert not isinstance(event, ToolCall)
            reply += event.text if isinstance(event, Text) else ""
            self.thought = isinstance(event, Thinking)
        self.messages.append({"role": "assistant", "content": reply})
        record = await self.engine.request(id)
        assert record is not None
        return record


def lost(record: RequestRecord) -> Lost:
    assert record.lost is not None
    return record.lost


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(toy, tmp_path_factory):
    async with started(
        toy("llama"), tmp_path_factory.mktemp("cache"), no_anticipate=True
    ) as running:
        yield running


@pytest.fixture
def talk(engine, request) -> Talk:
    return Talk(engine, request.node.name)


async def test_turns_that_reuse_all_there_was_have_lost_nothing(talk: Talk):
    """The first was never seen; of the others only what is new is fed."""
    first = await talk.say(talk.system(), user("Fix the parser. " + text(9, "ask")))
    assert (lost(first)["reason"], lost(first)["lost_tokens"]) == ("first_seen", 0)
    assert "first_seen" in log_line(first)
    for turn in range(3):
        record = await talk.say(user(f"Turn {turn}. " + text(9, str(turn))))
        assert record.lost is None, record.lost


async def test_a_date_in_the_system_prompt(talk: Talk):
    """Where, why, what it cost, and what to do; the log says so too, without any text."""
    await talk.say(talk.system(), user("Fix the parser. " + text(9, "ask")))
    before = await talk.engine.render(Chat(list(talk.messages[:-1]), TOOLS))
    talk.messages[0] = talk.system("Today's date is 2026-11-22.")
    record = await talk.say(user("And the lexer?"))
    found = lost(record)
    assert (found["reason"], found["cause"], found["where"]) == ("system_changed", "date", "system")
    assert "2026-11-21" in found["before"]
    assert "2026-11-22" in found["after"]
    after = await talk.engine.render(Chat(list(talk.messages[:-1]), TOOLS))
    size = min(len(before.ids), len(after.ids))
    assert found["at_token"] == int(np.flatnonzero(before.ids[:size] != after.ids[:size])[0])
    assert record.cached_tokens <= found["at_token"]
    assert LEAST_LOSS < found["lost_tokens"] <= record.fed_tokens
    assert found["lost_tokens"] > record.fed_tokens - 64
    assert found["lost_s"] > 0
    assert found["advice"]
    line = log_line(record)
    assert f"lost {found['lost_tokens']} (system_changed: date" in line
    assert "2026-11" not in line


async def test_a_loss_costs_no_more_than_the_prompt_took(talk: Talk, monkeypatch):
    """However slow prompts were before: the speed of a loaded hour is only a first guess."""
    core = await talk.engine.call(lambda runtime: runtime)
    await talk.say(talk.system(), user("Fix the parser. " + text(9, "ask")))
    monkeypatch.setattr(core.cost, "rate", 0.5)
    talk.messages[0] = talk.system("Today's date is 2026-11-22.")
    record = await talk.say(user(text(20, "more")))
    found = lost(record)
    assert found["reason"] == "system_changed"
    share = found["lost_tokens"] / record.fed_tokens
    assert found["lost_s"] == pytest.approx(share * record.timing["prefill_s"], abs=0.001)
    assert share < 1


async def test_what_was_cut_short_lost_no_more_than_it_was_fed(toy, tmp_path, monkeypatch):
    """A client that leaves has waited so long, for so many tokens; the rest was not computed."""
    async with started(toy("llama"), tmp_path, no_anticipate=True, prefill_chunk=256) as engine:
        core = await engine.call(lambda runtime: runtime)
        talk = Talk(engine, "cut")
        await talk.say(talk.system(), user(text(120, "ask")))
        monkeypatch.setattr(core.cost, "rate", 0.5)
        chat = Chat([talk.system("Today's date is 2026-11-22."), *talk.messages[1:]], TOOLS)
        prompt = await engine.render(chat, session=talk.session)
        began = time.perf_counter()
        stream = await engine.submit(Job("req_cut", prompt, session=talk.session, api="chat"))
        async for event in stream:
            if isinstance(event, Progress):
                break
        await stream.aclose()
        async for _ in stream:
            pass
        record = await engine.request("req_cut")
        took = time.perf_counter() - began
        assert record is not None
        assert (record.status, record.generated_tokens) == ("cancelled", 0)
        found = lost(record)
        assert 0 < found["lost_s"] <= took
        assert LEAST_LOSS < found["lost_tokens"] <= record.fed_tokens < record.prompt_tokens / 2
        assert engine.tally.lost_tokens["system_changed"] == found["lost_tokens"]
        assert found["lost_s"] <= record.timing["prefill_s"] <= took


async def test_the_loss_is_of_one_turn_only(talk: Talk):
    await talk.say(talk.system(), user("Fix the parser. " + text(9, "ask")))
    talk.messages[0] = talk.system("Requests so far: 2")
    assert lost(await talk.say(user("And the lexer?")))["reason"] == "system_changed"
    assert (await talk.say(user("And the rest?"))).lost is None


def _inserted(talk: Talk) -> None:
    talk.tools = [*TOOLS[:1], tool("Crop"), *TOOLS[1:]]


def _edited(talk: Talk) -> None:
    talk.messages[1] = user(talk.messages[1]["content"].replace("Fix the", "Fix a"))


def _dropped(talk: Talk) -> None:
    del talk.messages[1:3]


CHANGES: list[tuple[str, str, Callable[[Talk], None]]] = [
    ("tools_changed", "tool_inserted", _inserted),
    ("edited", "text", _edited),
    ("edited", "message_dropped", _dropped),
]


@pytest.mark.parametrize(("reason", "cause", "change"), CHANGES, ids=[c for _, c, _ in CHANGES])
async def test_changed_history_is_told(talk: Talk, reason: str, cause: str, change):
    await talk.say(talk.system(), user("Fix the parser. " + text(9, "ask")))
    await talk.say(user("And the lexer? " + text(30, "more")))
    change(talk)
    found = lost(await talk.say(user("And the rest?")))
    assert (found["reason"], found["cause"]) == (reason, cause)
    assert found["lost_tokens"] > LEAST_LOSS


async def test_the_same_words_as_in_a_title_request_have_lost_nothing(talk: Talk):
    """A title request, then the first prompt with the same message: the two share a few tokens.

    Also where the message is long, and where the title is asked for in a message of its own.
    """
    words = "Fix the parser. " + text(40, "long")
    side = Talk(talk.engine, talk.session)
    side.tools = []
    title = {"role": "system", "content": "You are a title generator. " + text(9, "title")}
    first = await side.say(title, user("Generate a title for this conversation:\n"), user(words))
    assert lost(first)["reason"] == "first_seen"
    record = await talk.say(talk.system(), user(words))
    assert record.cached_tokens < 16
    found = lost(record)
    assert (found["reason"], found["lost_tokens"], found["lost_s"]) == ("first_seen", 0, 0.0)
    assert (await talk.say(user("And the lexer?"))).lost is None


async def test_no_more_is_lost_than_there_was(talk: Talk):
    """A short prompt with the same first message is no long one that was lost."""
    short = await talk.say({"role": "system", "content": "Write a title."}, user("Fix the parser."))
    long = Talk(talk.engine, talk.session)
    record = await long.say(long.system(text(60, "long")), user("Fix the parser."))
    assert record.fed_tokens > 2 * short.prompt_tokens
    told = record.lost["lost_tokens"] if record.lost else 0
    assert told <= short.prompt_tokens + short.generated_tokens


async def test_a_message_that_is_taken_back_is_no_loss(talk: Talk):
    await talk.say(talk.system(), user("Fix the parser. " + text(9, "ask")))
    await talk.say(user("And the lexer? " + text(30, "more")))
    del talk.messages[3:]
    assert (await talk.say(user("Forget it. " + text(20, "other")))).lost is None


async def test_a_side_request_is_a_conversation_of_its_own(talk: Talk):
    """One label, another system text: never seen, and the main one goes on."""
    await talk.say(talk.system(), user("Fix the parser. " + text(9, "ask")))
    side = Talk(talk.engine, talk.session)
    side.tools = []
    title = {"role": "system", "content": "Write a title. " + text(20, "title")}
    found = lost(await side.say(title, user("Title, please: " + text(5, "t"))))
    assert found["reason"] == "first_seen"
    assert (await talk.say(user("And the lexer?"))).lost is None


async def test_another_session_with_nearly_the_same_head(talk: Talk):
    await talk.say(talk.system(), user("Fix the parser. " + text(9, "ask")))
    other = Talk(talk.engine, "other")
    record = await other.say(talk.system("Today's date is 2026-12-24."), user("Something else."))
    assert (lost(record)["reason"], lost(record)["cause"]) == ("system_changed", "date")
    third = await Talk(talk.engine, "third").say(talk.system(), user("Something new."))
    assert third.lost is None


async def test_what_was_evicted_is_told(talk: Talk):
    first = await talk.say(talk.system(), user("Fix the parser. " + text(9, "ask")))
    await talk.engine.call(lambda runtime: runtime.kv.clear())
    record = await talk.say(user("And the lexer?"))
    found = lost(record)
    assert (found["reason"], found["cause"], found["at_token"]) == ("evicted", "memory", 0)
    assert first.prompt_tokens <= found["lost_tokens"] <= record.fed_tokens


async def test_a_checkpoint_that_went_is_told(toy, tmp_path):
    """The KV is there and cannot be used without the state."""
    async with started(toy("qwen3_5"), tmp_path, no_anticipate=True) as engine:
        talk = Talk(engine, "opaque")
        await talk.say(talk.system(), user("Fix the parser. " + text(9, "ask")))
        assert (await talk.say(user("And the lexer?"))).lost is None

        def drop(core: Any) -> None:
            room = core.kv.ram
            left = [room.tree.root]
            while left:
                node = left.pop()
                left += node.children.values()
                if node.checkpoint is not None:
                    room._drop_checkpoint(node)

        await engine.call(drop)
        found = lost(await talk.say(user("And the rest?")))
        assert (found["reason"], found["cause"]) == ("checkpoint_gap", "no_checkpoint")


async def test_thinking_that_the_template_drops_is_told(toy, tmp_path, monkeypatch):
    """The reply is rendered differently than it was generated; its answer is computed again."""
    reply = f"I look at it.</think>\n\n{text(7, 'reply')}"
    runtime = type("Scripted", (ScriptedRuntime,), {"lines": [("parser", reply)]})
    monkeypatch.setattr("mlxcache.engine.engine.ModelRuntime", runtime)
    async with started(toy("llama", thinking=True), tmp_path, no_anticipate=True) as engine:
        talk = Talk(engine, "thinking")
        await talk.say(talk.system(), user("Fix the parser."), tokens=999)
        record = await talk.say(user("And the lexer?"))
        assert (lost(record)["reason"], lost(record)["cause"]) == (
            "template_drift",
            "thinking_dropped",
        )


async def test_a_request_that_was_cut_short_is_no_eviction(talk: Talk):
    """What was never computed was not lost."""
    chat = Chat([talk.system(), user(text(60, "long"))], TOOLS)
    prompt = await talk.engine.render(chat, session=talk.session)
    stream = await talk.engine.submit(Job("req_cut", prompt, session=talk.session, api="chat"))
    await stream.aclose()
    async for _ in stream:
        pass
    record = await talk.engine.request("req_cut")
    assert record is not None
    talk.messages = [dict(message) for message in chat.messages]
    again = await talk.say()
    assert again.lost is None or again.lost["lost_tokens"] <= record.fed_tokens


def damage(folder: Path) -> None:
    """Change a byte in the middle of each file of KV."""
    files = [*folder.rglob("*.safetensors")]
    assert files
    for file in files:
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)


async def test_what_was_damaged_on_disk_is_told(toy, tmp_path):
    """It is computed again, and not taken for evicted."""
    async with started(toy("llama"), tmp_path, disk="1GB", no_anticipate=True) as engine:
        talk = Talk(engine, "damaged")
        first = await talk.say(talk.system(), user("Fix the parser. " + text(9, "ask")))
        assert await engine.book.settled()
        damage(tmp_path)
        await engine.call(lambda runtime: runtime.kv.clear())
        record = await talk.say(user("And the lexer?"))
        found = lost(record)
        assert (found["reason"], found["cause"]) == ("corrupt", "checksum")
        assert found["lost_tokens"] == first.prompt_tokens + 5 - record.cached_tokens
        assert "cache check" in found["advice"]
        assert "corrupt: checksum" in log_line(record)


@pytest.mark.parametrize(
    "reason", [pytest.param("namespace", marks=pytest.mark.slow), "evicted", "corrupt"]
)
async def test_after_a_restart_the_sessions_leaves_are_compared(toy, tmp_path, reason: str):
    """By another model nothing can be used; what the disk evicted, or damaged, is told as that."""
    head = [system("", "restart"), user("Fix the parser. " + text(9, "ask"))]
    async with started(toy("llama"), tmp_path, disk="1GB", no_anticipate=True) as engine:
        await Talk(engine, "main").say(*head)
        assert await engine.book.settled()
        if reason == "evicted":
            await engine.sessions.prune(0)
    if reason == "corrupt":
        damage(tmp_path)
    model = toy("qwen3_5") if reason == "namespace" else toy("llama")
    async with started(model, tmp_path, disk="1GB", no_anticipate=True) as engine:
        record = await Talk(engine, "main").say(*head)
        found = lost(record)
        assert found["reason"] == reason
        assert record.prompt_tokens - LEAST_LOSS <= found["lost_tokens"] <= record.prompt_tokens
