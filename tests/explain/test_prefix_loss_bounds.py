"""A loss is never larger than what was shared with earlier prompts, nor than what was fed."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.common_prefix import common_length
from mlxcache.explain.compare import LEAST_LOSS
from mlxcache.explain.prefix_loss import PrefixLossReporter
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.scheduling.task import Task
from mlxcache.types import Admitted, Chat, Job, RequestRecord, Tokens
from tests.prompt import kinds, templates

Message = dict[str, Any]


@cache
def builder() -> PromptBuilder:
    return PromptBuilder(kinds.tokenizer("byte_level", templates.chatml()))


def words(seed: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(("file", "path", "agent", "edit", str(seed))) for _ in range(60))


def tool(name: int) -> Message:
    return {"type": "function", "function": {"name": f"tool{name}", "description": words(name)}}


SYSTEMS = [f"{words(90)}\nToday is {day}.\n{words(91)}" for day in ("Monday", "Tuesday")]
SYSTEMS += ["Write a title.", words(92), ""]

chats = st.tuples(
    st.sampled_from(SYSTEMS),
    st.sampled_from([(), (1, 2), (1, 3, 2), (2, 1)]),
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
)
"""System text, tools, and messages in turns; few of each, so that prompts share parts."""

requests = st.lists(
    st.tuples(
        chats,
        st.sampled_from([None, "a", "b"]),  # session
        st.floats(0, 1),  # share of the prefix that was not evicted
        st.one_of(st.none(), st.floats(0, 1)),  # share that is fed before the client leaves
    ),
    min_size=2,
    max_size=6,
)


def chat(system: str, tools: tuple[int, ...], said: list[int]) -> Chat:
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    roles = ("user", "assistant")
    messages += [{"role": roles[n % 2], "content": words(one)} for n, one in enumerate(said)]
    return Chat(messages, [tool(name) for name in tools])


class Server:
    """What a server tells the reporter, of a cache that holds what was computed, or less."""

    def __init__(self) -> None:
        self.reporter = PrefixLossReporter(builder(), lambda: 100.0, lambda label, ids: [])
        self.computed: list[Tokens] = []

    async def serve(
        self, chat: Chat, session: str | None, kept: float, left: float | None
    ) -> RequestRecord:
        prompt = builder().chat(chat, session)
        ids = prompt.ids
        there = max((common_length(one, ids) for one in self.computed), default=0)
        cached = int(kept * min(there, len(ids) - 1))
        fed = len(ids) - cached if left is None else int(left * (len(ids) - cached))
        job = Job(f"req_{len(self.computed)}", prompt, session=session, api="chat")
        record = RequestRecord(job.id, session, "chat", None, "done", 0.0, len(ids), cached)
        task = SimpleNamespace(
            job=job, record=record, lookup=None, matched=cached, lease=object(), out=[],
            phase_began=time.perf_counter(), tokens=lambda: ids,
        )  # fmt: skip
        self.reporter.note_admission(cast(Task, task), Admitted(len(ids), cached, 0))
        record.fed_tokens, record.timing["prefill_s"] = fed, 0.001 * fed
        over = asyncio.Event()
        self.reporter.note_end(cast(Task, task), over.set)
        await over.wait()
        self.check(record, ids)
        self.computed.append(ids[: cached + fed])
        return record

    def check(self, record: RequestRecord, ids: Tokens) -> None:
        """Compare a loss with the bounds, found in another way."""
        if record.lost is None:
            return
        told, fed = record.lost["lost_tokens"], record.fed_tokens
        assert told <= fed
        assert record.lost["lost_s"] <= record.timing["prefill_s"] + 1e-6
        new = ids[record.cached_tokens : record.cached_tokens + fed]
        common = [_common(new, one) for one in self.computed]
        assert told <= max(common, default=0)
        assert told > LEAST_LOSS or record.lost["reason"] == "first_seen"


def _common(one: Tokens, other: Tokens) -> int:
    counts = Counter(np.asarray(one).tolist()) & Counter(np.asarray(other).tolist())
    return sum(counts.values())


@settings(max_examples=100, deadline=None)
@given(requests)
def test_a_loss_is_at_most_what_was_shared_and_what_was_fed(served):
    """Whatever was evicted, changed or cut short; its time at most what the prompt took."""

    async def run() -> None:
        server = Server()
        try:
            for said, session, kept, left in served:
                await server.serve(chat(*said), session, kept, left)
        finally:
            server.reporter.close()

    asyncio.run(run())
