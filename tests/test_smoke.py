"""The smoke test of a real model tells right counts from wrong ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxcache.bench.client import Reply
from tests import smoke

Conversation = tuple[list[Reply], list[dict[str, str]], int]


def reply(prompt: int, cached: int, text: str) -> Reply:
    return Reply(text, 0.1, 0.2, 0.3, prompt, cached, 8, "r")


def turns(model: Path, least: int, *, restart: bool) -> Conversation:
    """Three turns as a right server takes them, the third reusing `least` tokens."""
    messages = [{"role": "system", "content": smoke.RULES}]
    for question in smoke.QUESTIONS:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "A cache."},
        ]
    replies = [reply(900, 0, "A"), reply(1000, 890, "B"), reply(1100, least, "C")]
    return replies, messages, least if restart else 0


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({}, None),
        ({"cached": -1}, "the same after a restart"),
        ({"restored": -1}, "all that is reused"),
        ({"text": "D"}, "replies are the same"),
        ({"both": -1}, "the two prompts share"),
    ],
)
def test_each_wrong_count_is_found(
    wrong: dict[str, Any],
    word: str | None,
    toy: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One token too few is enough; the least is computed from the model's own template."""
    model = toy("llama")
    least = smoke.least_cached(model, turns(model, 0, restart=False)[1])
    assert least > 900

    def conversation(model: Path, home: Path, *, restart: bool) -> Conversation:
        replies, messages, restored = turns(model, least + wrong.get("both", 0), restart=restart)
        if restart:
            cached = (replies[2].cached_tokens or 0) + wrong.get("cached", 0)
            text = wrong.get("text", replies[2].text)
            replies[2] = replace(replies[2], cached_tokens=cached, text=text)
            restored += wrong.get("restored", 0)
        return replies, messages, restored

    monkeypatch.setattr(smoke, "conversation", conversation)
    found = smoke.failures(model, tmp_path)
    if word is None:
        assert found == []
    else:
        assert any(word in line for line in found)


@pytest.mark.slow
@pytest.mark.parametrize("thinking", [False, True])
def test_a_server_passes_it(thinking: bool, toy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Real servers, with and without a template that drops thinking."""
    assert smoke.main(["--model", str(toy("llama", thinking=thinking))]) == 0
    assert "all counts are exact" in capsys.readouterr().out
