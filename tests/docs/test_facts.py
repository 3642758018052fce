"""Figures that pages state in words are those of the code, and pages hold what was once untrue."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from mlxcache.api import access, http, openai, record
from mlxcache.cache import (
    checkpoints,
    main_conversation,
    path_write,
    pressure,
    restore,
    write_behind,
)
from mlxcache.cli import protocol, serve
from mlxcache.cli.doctor import disk, machine
from mlxcache.config import parse_size, sizes
from mlxcache.config.settings import MOST_DRAFTED
from mlxcache.engine import keep_awake, metrics
from mlxcache.explain import compare
from mlxcache.model import chat_template
from mlxcache.prompt import replies
from mlxcache.scheduling import loop_guard
from mlxcache.sessions import journal
from mlxcache.store import leaves, reply_rows, session_rows, store
from mlxcache.tree import eviction
from mlxcache.wire import chat_parts, decode
from tests.docs.blocks import BLOCKS, ROOT
from tests.served import Served, served

EFFORTS = chat_parts.EFFORT_BUDGETS
FACTS = (
    ("configuration", r"and at most (\S+ GB)\. Whatever the limit", sizes.MOST_DISK),
    ("configuration", r"the limit, (\S+ GB) of the disk stay free", store.FREE_FLOOR),
    ("configuration", r"memory; at least (\S+ MB)\.", sizes.MIN_RAM),
    ("configuration", r"memory, at least (\S+ GB) and at most 16 GB, is", sizes.LEAST_LEFT),
    ("configuration", r"at least 4 GB and at most (\S+ GB), is", sizes.MOST_LEFT),
    ("operations", r"waits (\d+) seconds at its next start", serve.FIRST_S),
    ("operations", r"such panics of the last (\d+) days", machine.PANIC_DAYS),
    ("configuration", r"budget and start by (\d+)%", round(100 * pressure.TOLERANCE)),
    ("configuration", r"repeated the same 1 to ([\d,]+) tokens", loop_guard.LONGEST),
    ("configuration", r"\| (\d+) or more \| 1,000 tokens", loop_guard.OFTEN),
    ("configuration", r"\| 50 or more \| ([\d,]+) tokens", loop_guard.OFTEN_TOKENS),
    ("configuration", r"\| (\d+) or more \| 4,000 tokens", loop_guard.SELDOM),
    ("configuration", r"\| 8 or more \| ([\d,]+) tokens", loop_guard.SELDOM_TOKENS),
    ("configuration", r"tokens drafted at once, 1 to (\d+);", MOST_DRAFTED),
    ("configuration", r"and for (\d+) seconds after the last, `off`", keep_awake.GRACE_S),
    ("sessions", r"At most ([\d,]+) sessions are kept", session_rows.MOST_SESSIONS),
    ("sessions", r"has gone on for (eight) turns", leaves.SETTLED_TURNS),
    ("http-api", r"a body of (\S+ MiB) \(413\)", http.ApiSettings().max_body_bytes),
    ("http-api", r"with (\d+) levels of nesting", decode.MAX_DEPTH),
    ("http-api", r"nesting and ([\d,]+) values", decode.MAX_VALUES),
    ("http-api", r"has at most ([\d,]+) of them", openai.MAX_PROMPT_LOGPROBS),
    ("http-api", r"headers must arrive within (\d+) seconds", protocol.HEAD_SECONDS),
    ("http-api", r"part of the body within (\d+) seconds", http.BODY_PAUSE_S),
    ("http-api", r"the whole body within (\d+) seconds", http.BODY_S),
    ("http-api", r"The last ([\d,]+) requests are kept", metrics.MAX_RECORDS),
    ("http-api", r"Losses of up to (\d+) tokens are not", compare.LEAST_LOSS),
    ("http-api", r"or at most (\d+) tokens of it", metrics.MIN_REUSED_TOKENS),
    ("http-api", r"`minimal` (\d+) tokens", EFFORTS["minimal"]),
    ("http-api", r"`low` ([\d,]+),", EFFORTS["low"]),
    ("http-api", r"`medium` ([\d,]+),", EFFORTS["medium"]),
    ("http-api", r"`high` ([\d,]+);", EFFORTS["high"]),
    ("how-caching-works", r"and every ([\d,]+) tokens\. A prompt", checkpoints.SPACING),
    ("how-caching-works", r"up to (\d+) in a row", main_conversation.MAX_SIDE_REQUESTS),
    ("how-caching-works", r"Up to (\d+) tokens that are missing", restore.MIN_UNKNOWN),
    ("how-caching-works", r"uses \(up to (three)\)", eviction.MOST_USES),
    ("disk-format", r"A run has at most ([\d,]+) tokens or", path_write.RUN_TOKENS),
    ("disk-format", r"2,048 tokens or (\S+ MiB), so", path_write.RUN_BYTES),
    ("how-caching-works", r"same content is used\. (\S+ MiB)", replies.LIMIT_BYTES),
    ("sessions", r"the newest ([\d,]+) replies", reply_rows.MOST_KEYS),
    ("security", r"at most once in (\d+) seconds", access.LOG_INTERVAL_S),
    ("security", r"it is stopped after (\d+) seconds", chat_template.RENDER_SECONDS),
    ("security", r"may have ([\d,]+) characters", chat_template.SOURCE),
    ("security", r"a value in it ([\d,]+),", chat_template.LIMIT),
    ("security", r"for one prompt (\d GiB) in all", chat_template.TOTAL),
    ("how-caching-works", r"At most ([\d,]+) files and", record.MAX_FILES),
    ("how-caching-works", r"files and (\S+ MB) are kept", record.MAX_BYTES),
    ("troubleshooting", r"writing and reading (\S+ MiB)", disk.TEST_BYTES),
    ("troubleshooting", r"it was missing, at most (\d+), are then added", journal.MAX_LATE),
    ("troubleshooting", r"4 s and so on, up to every (\d+) s\.", write_behind.RETRY_S),
)
"""A page, an expression whose group is the figure, and the figure in the code."""

WORDS = {"three": 3, "eight": 8}


def read(page: str) -> str:
    """The text of a page, with its lines joined."""
    return " ".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("page", "words", "figure"), FACTS, ids=lambda one: str(one)[:40])
def test_a_figure_in_a_page_is_the_one_in_the_code(page: str, words: str, figure: float) -> None:
    found = re.search(words, read(page))
    assert found, words
    text = found[1]
    if text.endswith("B"):
        assert parse_size(text.replace(" ", ""), total=0) == figure
    else:
        assert (WORDS.get(text) or int(text.replace(",", ""))) == figure


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The demo model with little memory, once it is ready."""
    with served("--ram", "70MB", "--disk", "off", home=tmp_path_factory.mktemp("home")) as running:
        running.wait_for("^Context")
        yield running


def test_the_context_that_is_printed_is_what_the_memory_holds(small: Served) -> None:
    """Two lines of configuration.md, and the number that clients are told."""
    (block,) = (
        block for block in BLOCKS if block.note == "the start of a server with little memory"
    )
    number = re.compile(r"\b\d[\d,]{4,6}\b|\b\d+\.\d(?= MB)")
    shown = [number.sub("N", line) for line in block.code.splitlines()]
    printed = [number.sub("N", line) for line in small.output.splitlines()]
    assert all(any(line in one for one in printed) for line in shown), small.output
    told = httpx.get(f"{small.url}/v1/models").json()["data"][0]["context_length"]
    assert told < 131_072
    assert f"Context  {told:,} tokens" in small.output


def test_the_fork_of_the_page_works_on_the_shortest_reply(server: Served) -> None:
    """Its tokens are within the prompt: a reply may have one token."""
    (at,) = re.findall(r"sessions fork trees --at (\d+)", read("sessions"))
    body = {"messages": [{"role": "user", "content": "Name three trees."}], "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert int(at) <= answer["usage"]["prompt_tokens"]
    assert "Name three trees." in read("sessions")


EVICTED = {
    "evicted last": ("cli/sessions.py", "api/page/sessions.js", "docs/glossary.md"),
    "used least often and longest ago first, pinned ones last": ("cli/cache.py", "api/cache.py"),
}


@pytest.mark.parametrize("words", EVICTED)
def test_pins_and_pruning_are_described_in_the_same_words(words: str) -> None:
    for name in EVICTED[words]:
        path = ROOT / name if name.startswith("docs/") else ROOT / "mlxcache" / name
        assert words in " ".join(path.read_text(encoding="utf-8").split()), name
