"""The audit finds text that is likely to change, and nothing that only looks like it."""

from __future__ import annotations

import random
import time
from functools import lru_cache
from typing import Any

import pytest

from mlxcache.config.rules import RULES
from mlxcache.explain.audit import Finding, audit
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.types import Chat
from tests.prompt import kinds, templates

WORDS = """
    the file path tool command agent session request turn message token budget date time
    status branch commit hash version context left remaining read write edit run test build
    result when
""".split()  # noqa: SIM905 - read as a text

CLEAN = """\
# Versions
Requires Python 3.11.4, node v20.11.1 and mlx-lm>=0.32.2,<0.33; see CHANGELOG 1.2.3 (2024-05-06).
Released on March 4, 2023. Copyright 2019-2024. RFC 3339 dates look like 2024-01-01T00:00:00Z.
The knowledge cutoff is January 2025. Use ISO dates (YYYY-MM-DD), such as 2020-02-30.

# Code
    MASK = 0xDEADBEEF; SEED = 0x9e3779b9  # golden ratio
    color: #ff8800; background: #0a1b2c3d
    digest == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    time.sleep(30)  # at most 30 seconds; then 3 turns
    uuid.UUID("550e8400-e29b-41d4-a716-446655440000")
    CLSID_Shell = {13709620-C279-11CE-A49E-444553540000}
    git checkout 1a2b3c4d5e6f7890 && git log --oneline -5
    ls /tmp/build && cat /var/log/system.log /tmp/output.txt
    curl http://127.0.0.1:8081/v1/models  # 10:30 is not a time here
    {"date": "2024-05-06", "timestamp": 1700000000, "session_id": "string", "request_id": "..."}

# Rules
The fix came with commit 4f5e6d7c and was reverted in 89abcdef0123. Run git status first.
You have a context window of 200,000 tokens. Commands time out after 120000 ms (2 minutes).
Limit each reply to 3 messages. When 10 tokens are cut, say so. Step 1 of the plan: read.
Never use more than 5 tool calls in one turn. Turn 1 is for questions. Requests: see below.
If the budget is exceeded, stop. A session id names a session; keep it. Today is a good word.
The current date is given by the user. The current time does not matter. On branches: use main.
Steps: 3 at most. Budget: 5000 tokens per reply. Time limit: 30. Started at the top of the file.
As of 2024-05-06 the API has two forms. Session: a named conversation. Messages: 100. Tokens: words.
Context: all that was said. Uptime: see the page. Model: claude-opus-4-8-20251101. It is Saturday's.
Use commit abc1234 as the base. HEAD is at the top. Branch: main. Step 1/3: read. PID: of a process.
Status: done or open. Recent commits are shown by git log. Working directory: /Users/me/work
"""

VOLATILE = [
    (
        "attribution",
        "x-anthropic-billing-header: cc_version=2.1.329.0a8; cc_entrypoint=cli; cch=36ee5;",
    ),
    ("counter", "<total_tokens>180000 tokens left</total_tokens>"),
    ("counter", "Token usage: 91234/200000; 108766 remaining"),
    ("counter", "You have 108,766 tokens remaining."),
    ("counter", "- Messages so far: 12"),
    ("counter", "This is turn 5 of 20."),
    ("date", "Today's date is 2026-11-21."),
    ("date", "Today's date: Sat Nov 21 2026"),
    ("date", "The current time is 18:19:52 UTC."),
    ("date", "Current date and time: Saturday, November 21, 2026, 6:19 PM"),
    ("date", "Timestamp: 1795285192"),
    ("date", "- Generated at: 2026-11-21T18:19:52.123Z"),
    ("date", "<current_date>2026-11-21</current_date>"),
    ("date", "As of 2026-11-21T18:19:52Z"),
    ("date", "Session started: 2026-11-21 18:19:52"),
    ("date", "current_time: 2026-11-21T18:19:52+01:00"),
    ("date", "It is Saturday, 21 November 2026, 18:19 CET."),
    ("counter", "Context: 45% used"),
    ("counter", "You have used 12 of 50 turns."),
    ("counter", "Turn 5/20"),
    ("counter", "Remaining tokens: 5000"),
    ("counter", "Uptime: 3 days, 4:05"),
    ("uuid", "<session_id>5d5be120-4981-be7a-4112-0123456789ab</session_id>"),
    ("uuid", "Session ID: 5d5be120-4981-be7a-4112-0123456789ab"),
    (
        "uuid",
        "Scratchpad directory: /private/tmp/claude-501/-Users-me-work/"
        "5d5be120-4981-be7a-4112-0123456789ab/scratchpad",
    ),
    ("uuid", '"conversation_id": "5d5be120-4981-be7a-4112-0123456789ab"'),
    (
        "temp_path",
        "Write scratch files to /var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T/tmpab12cd34",
    ),
    ("hash", "cache_bust=9f86d081"),
    ("hash", "Request id: req_011CSHoEeqs5C35K2UUqR7Fy"),
    ("hash", "Session: sess_0a1b2c3d4e5f"),
    ("hash", "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ("hash", "PID: 48213"),
    ("git_status", "Last commit: 1a2b3c4 Add a reader"),
    ("git_status", "HEAD is at 1a2b3c4"),
    ("git_status", "Branch: main (ahead 2)"),
    ("git_status", "gitStatus: M server.py"),
    ("git_status", '<context name="gitStatus">As it was.\n\nM server.py\n</context>'),
    ("git_status", "Current branch: feature/explain"),
    ("git_status", "Status:\n M server.py\n?? notes.md"),
    ("git_status", "Recent commits:\n1a2b3c4 Add a reader\n5d6e7f8 Fix the parser"),
]


def filler(size: int, seed: str) -> str:
    rng = random.Random(seed)
    lines = []
    while size > 0:
        line = " ".join(rng.choice(WORDS) for _ in range(12)).capitalize() + "."
        lines.append(line)
        size -= len(line)
    return "\n".join(lines)


def tool(name: str) -> dict[str, Any]:
    description = f"{filler(1500, name)}\nExample: {CLEAN[:900]}"
    parameters = {"type": "object", "properties": {"path": {"type": "string", "description": name}}}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def request(*, system: str = "", reminder: str = "", told: str = "", described: str = "") -> Chat:
    """About 75 KB, as a coding agent sends: 24 tools, a long system text, a reminder, a turn."""
    tools = [tool(f"Tool{chr(65 + i)}") for i in range(24)]
    function = tools[7]["function"]
    tools[7] = {
        "type": "function",
        "function": {**function, "description": f"{described}\nIt reads."},
    }
    head = f"{filler(5000, 'a')}\n{CLEAN}\n{system}\n\n{filler(5000, 'b')}"
    asked = f"<system-reminder>\n{filler(2500, 'c')}\n{reminder}\n{CLEAN}</system-reminder>\n{told}"
    return Chat(
        [
            {"role": "system", "content": head},
            {"role": "user", "content": asked},
            {"role": "assistant", "content": f"Yes. {told}"},
            {"role": "user", "content": f"Go on. {told}"},
        ],
        tools,
    )


@lru_cache(maxsize=1)
def builder() -> PromptBuilder:
    tokenizer = kinds.tokenizer("byte_level", templates.chatml())
    return PromptBuilder(tokenizer, rules=dict.fromkeys(RULES, False))


def audited(chat: Chat) -> tuple[list[Finding], int]:
    made = builder()
    prompt = made.chat(chat, "s")
    return audit(made, prompt), len(prompt.ids)


def test_a_clean_request_raises_no_alarm():
    chat = request()
    assert 50_000 < sum(len(str(m)) for m in [*chat.messages, *chat.tools]) < 120_000
    assert audited(chat)[0] == []


def test_what_people_and_models_wrote_is_not_looked_at():
    told = "\n".join(text for _, text in VOLATILE)
    assert audited(request(told=told))[0] == []


@pytest.mark.parametrize(
    ("part", "cause", "text"),
    [
        *(("system", *one) for one in VOLATILE),
        *(("reminder", *one) for one in VOLATILE[::8]),
        *(("described", *one) for one in VOLATILE[1::8]),
    ],
)
def test_each_volatile_item_is_found_where_it_stands(part: str, cause: str, text: str):
    """Once, with its cause, its part, its line, and all tokens behind it at stake."""
    chat = request(**{part: text})
    found, tokens = audited(chat)
    assert [one.cause for one in found] == [cause], found
    (one,) = found
    assert (
        one.where
        == {
            "system": "system",
            "reminder": "messages[1] user",
            "described": "tools[7] ToolH",
        }[part]
    )
    assert one.text.splitlines()[0] in text
    assert one.at_token is not None
    assert one.tokens_behind == tokens - one.at_token
    ids = builder().chat(chat, "s").ids.tolist()
    assert one.text[:5] in builder().decode(ids[one.at_token : one.at_token + 12])
    assert one.advice


def test_all_at_once_are_told_in_the_order_of_the_prompt():
    """None hides another, but the lines of a Git status are told once, at the first."""
    text = "\n\n".join(text for _, text in VOLATILE)
    found, _ = audited(request(system=text))
    git = [i for i, (cause, _) in enumerate(VOLATILE) if cause == "git_status"][1:]
    assert git
    assert [one.cause for one in found] == [
        cause for i, (cause, _) in enumerate(VOLATILE) if i not in git
    ]
    assert [one.at_token for one in found] == sorted(one.at_token or 0 for one in found)


def test_tools_out_of_order_are_told():
    """Sorting them is the surest way to keep them in place."""
    chat = request()
    tools = [*chat.tools[:5], chat.tools[6], chat.tools[5], *chat.tools[7:]]
    (one,), _ = audited(Chat(chat.messages, tools))
    assert (one.cause, one.where) == ("tool_order", "tools[6] ToolF")
    assert one.tokens_behind > 1000
    assert one.rule is None


def test_tools_out_of_order_are_no_matter_where_the_order_is_kept():
    """That is what the rule tool_order is for."""
    tokenizer = kinds.tokenizer("byte_level", templates.chatml())
    made = PromptBuilder(tokenizer, rules=dict.fromkeys(RULES, False) | {"tool_order": True})
    tools = request().tools
    (one,) = audit(made, made.chat(Chat(request().messages, [*tools[1:], tools[0]])))
    assert (one.cause, one.rule, one.tokens_behind) == ("tool_order", "tool_order", 0)


def test_shapes_take_linear_time_on_hostile_text():
    """No pattern backtracks without bound: four times the text takes four times as long."""
    hostile = ["a" * 60_000, "1" * 60_000, "-" * 60_000, " M x\n" * 12_000, "/tmp/" * 12_000]
    hostile += ["Session id: " * 5_000, "1, " * 20_000, "x-anthropic-billing-header:" * 2_000]
    made = builder()

    def cpu_seconds(text: str) -> float:
        prompt = made.chat(Chat([{"role": "system", "content": text}]))
        began = time.thread_time()
        audit(made, prompt)
        return time.thread_time() - began

    for text in hostile:
        quarter = min(cpu_seconds(text[: len(text) // 4]) for _ in range(3))
        whole = min(cpu_seconds(text) for _ in range(3))
        assert whole < 8 * quarter, (
            f"{text[:20]!r}: {quarter:.3f} s, four times as long {whole:.3f} s"
        )
