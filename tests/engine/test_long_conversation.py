"""An agent's conversation of 10 turns, or 40, where most layers cannot be sliced."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from mlxcache.cache import write_behind
from mlxcache.engine.engine import Engine
from mlxcache.tree.thinning import BUDGET_SHARE, allowed
from mlxcache.types import Event, Finished, Job, Prompt, Text, token_ids
from tests.engine.running import started

HEAD, RESULT, REPLY = 300, 100, 8
LIMITS = {"ram": "150MB", "disk": "400MB"}
SLACK = 64
"""Tokens that a turn may feed beyond those that are new."""


class Conversation:
    """Prompts as ChatML has them: each message opens with a token of its own and a role.

    The first `thought` tokens of a reply are not part of the prompts that follow.
    """

    def __init__(self, thought: int) -> None:
        self.thought = thought
        self.rng = np.random.default_rng(3)
        self.ids: list[int] = [1, 2, *self.words(HEAD)]
        self.marks: list[int] = []
        self.seen: list[int] = []

    def words(self, count: int) -> list[int]:
        """Tokens of no meaning."""
        return [int(t) for t in self.rng.integers(100, 400, count)]

    def say(self, count: int) -> None:
        """A user's message, or a tool's result."""
        self.marks.append(len(self.ids))
        self.ids += [1, 3, *self.words(count), 5]

    async def ask(self, engine: Engine) -> tuple[int, int]:
        """A turn, whose reply becomes part of the conversation: the tokens fed, and those new."""
        self.marks.append(len(self.ids))
        self.ids += [1, 4]
        ids = list(self.ids)
        prompt = Prompt(token_ids(ids), tuple(self.marks))
        job = Job(f"req_{time.monotonic_ns()}", prompt, max_tokens=REPLY, raw=True, top_logprobs=0)
        reply: list[int] = []
        last: Event | None = None
        async for last in await engine.submit(job):
            if isinstance(last, Text):
                reply += [entry.token_id for entry in last.logprobs]
        assert isinstance(last, Finished)
        assert len(reply) == REPLY
        shared = next(
            (i for i, (a, b) in enumerate(zip(ids, self.seen, strict=False)) if a != b), 0
        )
        shared = shared or min(len(self.seen), len(ids))
        self.seen = [*ids, *reply]
        self.ids += reply[self.thought :]
        return len(ids) - last.cached_tokens, len(ids) - shared


def on_disk(folder: Path, kind: str) -> int:
    """Bytes of the files of a kind."""
    return sum(path.stat().st_size for path in folder.rglob(f"{kind}/*/*"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its state takes as much as the KV of some 260 tokens, as long as two messages."""
    from tests.toys.toy import make_toy

    path = tmp_path_factory.mktemp("heavy") / "model"
    return make_toy(path, "qwen3_5", heads=8, kv_heads=1, head_dim=64)


@pytest.mark.parametrize(
    ("turns", "thought"),
    [
        (10, 5),
        pytest.param(40, 0, marks=pytest.mark.slow),
        pytest.param(40, 5, marks=pytest.mark.slow),
    ],
)
async def test_many_turns(
    model: Path, tmp_path: Path, turns: int, thought: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each feeds what is new; checkpoints are few in RAM, and on disk, and after a restart.

    The conversation rests after each turn, so that most of them are written.
    """
    monkeypatch.setattr(write_behind, "REST_S", 0.0)
    talk = Conversation(thought)
    ram, disk, more = [], [], []
    async with started(model, tmp_path, **LIMITS) as engine:
        for _ in range(turns):
            talk.say(RESULT)
            fed, new = await talk.ask(engine)
            more.append(fed - new)
            assert await engine.book.settled()
            ram.append(await engine.call(lambda core: core.kv.tree.checkpoint_bytes))
            disk.append(on_disk(tmp_path, "checkpoints"))
        layout = await engine.call(lambda core: core.layout)
        limit = await engine.call(lambda core: core.kv.budget.limit)
    size, tokens = layout.checkpoint_bytes, len(talk.ids)
    bound = allowed(tokens * layout.bytes_per_token, size, limit)
    messages = 1 + 2 * turns
    figures = {
        "most fed beyond what is new": max(more),
        "RAM, of one per message": ram[-1] / size / messages,
        "disk, of one per message": disk[-1] / size / messages,
        "disk, of KV": disk[-1] / on_disk(tmp_path, "runs"),
        "disk, second half of first": (disk[-1] - disk[turns // 2]) / disk[turns // 2],
    }
    print({name: round(figure, 3) for name, figure in figures.items()})
    assert max(more[1:]) <= SLACK
    assert max(ram) <= min(1.5 * size * messages, limit * BUDGET_SHARE)
    if not thought:  # else the ends of replies that were left are on paths of their own
        assert ram[-1] <= bound
    assert disk[-1] <= 1.5 * size * messages
    assert disk[-1] - disk[turns // 2] <= 1.2 * disk[turns // 2]
    async with started(model, tmp_path, **LIMITS) as engine:
        await go_on(engine, talk)


async def go_on(engine: Engine, talk: Conversation) -> None:
    """The next turn, and an edit in the middle, from disk alone."""
    talk.say(RESULT)
    fed, new = await talk.ask(engine)
    assert fed - new <= SLACK
    for back in (3, 20, 60) if len(talk.marks) > 60 else (3, 20):
        at = talk.marks[-back]
        edited = Conversation(0)
        edited.ids, edited.marks = [*talk.ids[:at]], [m for m in talk.marks if m < at]
        edited.seen = talk.seen
        edited.say(30)
        distance = len(talk.ids) - at
        fed, new = await edited.ask(engine)
        assert fed - new <= max(SLACK, distance // 2)
