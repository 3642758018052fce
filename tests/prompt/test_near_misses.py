"""Text of users and tools reaches the model word for word, whatever it looks like."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.config.rules import RULES
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.canonical import removed
from mlxcache.wire.chat_bodies import request_to_chat
from tests.prompt import kinds, templates

SESSION = "5d5be120-4981-be7a-4112-0123456789ab"
OTHER = "7a1b0c6e-1111-4222-8333-944455556666"
NOISE = (
    "x-anthropic-billing-header: cc_version=2.1.329.0a8; cc_entrypoint=cli; cch=36ee5;",
    "<total_tokens>180000 tokens left</total_tokens>",
    f"Scratchpad directory: /private/tmp/claude-501/-Users-me/{OTHER}/scratchpad",
    f"Session ID: {SESSION}",
    f"/tmp/{SESSION}/a.py",
    "gitStatus: This is the git status at the start of the conversation.\nCurrent branch: main\n\n"
    "Status:\n M server.py\n\nRecent commits:\n1a2b3c4 Add a reader",
    "[Old tool result content cleared] and more",
    "<system-reminder>\nToday's date is 2026-11-21.\n</system-reminder>",
    removed.reminder("Sunday, November 22, 2026"),
    "<env>\nWorking directory: /tmp/a\n</env>",
    "# Environment\nYou have been invoked in the following environment: \n - Platform: darwin",
    "<|im_end|>\n<|im_start|>system",
    "<tool_call>\n{}\n</tool_call>",
    "<think>",
    "naïve  two blanks\t",
)
GLUE = ("\n", "\n\n", " ", "", "\n```\n", "> ", "    ", "\r\n", "\ufeff")
MOST = {rule: True for rule in RULES}


@cache
def builder(*, most: bool) -> PromptBuilder:
    """With the rules that are on by themselves, or with all."""
    tokenizer = kinds.tokenizer("byte_level", templates.chatml(keep="true"))
    return PromptBuilder(tokenizer, rules=MOST if most else None)


@st.composite
def texts(draw: st.DrawFn) -> str:
    parts = draw(st.lists(st.sampled_from((*NOISE, *GLUE)), min_size=1, max_size=5))
    return "".join(parts)


def openai(asked: str, said: str, result: str, again: str) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "Read", "arguments": "{}"}}
    return {
        "messages": [
            {"role": "system", "content": f"{NOISE[0]}\nYou help.\nScratch: /tmp/{SESSION}/pad"},
            {"role": "user", "content": [{"type": "text", "text": asked}]},
            {"role": "assistant", "content": said, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": result},
            {"role": "user", "content": again},
        ]
    }


def anthropic(asked: str, said: str, result: str, again: str) -> dict[str, Any]:
    call = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {}}
    answer = [{"type": "tool_result", "tool_use_id": "toolu_1", "content": result}]
    tool = {"name": "Read", "description": "Reads.", "input_schema": {"type": "object"}}
    return {
        "max_tokens": 9,
        "tools": [tool],
        "system": [
            {"type": "text", "text": NOISE[0]},
            {"type": "text", "text": f"You help.\nScratch: /tmp/{SESSION}/pad"},
        ],
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": [{"type": "text", "text": said or "."}, call]},
            {"role": "user", "content": [*answer, {"type": "text", "text": again}]},
        ],
    }


@pytest.mark.parametrize("most", [False, True], ids=["rules as they are", "all rules"])
@pytest.mark.parametrize("body", [openai, anthropic])
@settings(max_examples=60, deadline=None)
@given(asked=texts(), result=texts(), again=texts())
def test_texts_reach_the_model_word_for_word(
    body: Any, most: bool, asked: str, result: str, again: str
) -> None:
    made = builder(most=most)
    prompt = made.chat(request_to_chat(body(asked, "I look.", result, again)))
    text = made.decode(prompt.ids.tolist())
    assert NOISE[0] not in text.split("You help.")[0]
    at = text.find(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant")
    assert at >= 0
    seen = result
    for stable, own in prompt.names.items():
        seen = seen.replace(own, stable)
    at = text.find(f"\n{seen}\n</tool_response>", at)
    assert at >= 0
    assert text.find(again, at) >= 0
