from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mlxcache.common_prefix import common_length
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.incremental import Tokenised
from mlxcache.prompt.marks import MARK_DISTANCE, find_marks, keep_positions
from mlxcache.types import Chat, Tokens, join_ids, token_ids
from tests.prompt import kinds, templates
from tests.prompt.chats import TOOLS, call, result

OPENERS = {
    "QWEN3": {"<|im_start|>", "<tool_response>"},
    "LLAMA3": {"<|start_header_id|>"},
    "GEMMA": {"<start_of_turn>"},
    "MISTRAL": {"[INST]", "[/INST]"},
}


@pytest.mark.parametrize("name", OPENERS)
def test_openers_are_learned_from_the_template(name: str) -> None:
    builder = PromptBuilder(kinds.tokenizer("byte_level", getattr(templates, name)))
    backend = kinds.backend("byte_level")
    found = {backend.id_to_token(token) for token in builder.openers}
    assert found & OPENERS[name] == OPENERS[name]
    assert found <= {*OPENERS[name], "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"}


def prompt(length: int, at: list[int], opener: int = 7) -> Tokenised:
    ids = np.ones(length, dtype=np.int32)
    ids[at] = opener
    where = np.array(at, dtype=np.int64)
    return Tokenised("x" * length, token_ids(ids), where, where + 1, where)


def test_marks_ascend_and_are_apart_and_end_at_the_generation_prompt() -> None:
    assert find_marks(prompt(100, [0, 20, 22, 50, 90]), frozenset([7]), 90) == (20, 50, 90)
    assert find_marks(prompt(100, [0, 20, 85, 90]), frozenset([7]), 90) == (20, 90)
    assert find_marks(prompt(100, [0, 20]), frozenset([7]), 100) == (20,)
    assert find_marks(prompt(100, []), frozenset(), 60) == (60,)
    assert find_marks(prompt(100, [1]), frozenset([3]), 0) == ()
    assert MARK_DISTANCE > 1


@pytest.mark.parametrize("name", ["QWEN3", "LLAMA3", "GEMMA"])
def test_each_message_starts_at_a_mark(name: str) -> None:
    source = getattr(templates, name)
    builder = PromptBuilder(kinds.tokenizer("byte_level", source))
    words = "some words that make this message longer than marks are apart"
    messages = [
        {"role": "system", "content": f"S {words}"},
        {"role": "user", "content": f"U {words}"},
        {"role": "assistant", "content": f"A {words}"},
        {"role": "user", "content": f"V {words}"},
    ]
    found = builder.chat(Chat(messages, TOOLS))
    backend = kinds.backend("byte_level")
    starts = [0, *found.marks, len(found.ids)]
    pieces = [
        backend.decode(found.ids[a:b].tolist(), skip_special_tokens=False)
        for a, b in pairwise(starts)
    ]
    expected = ["S", "U", "A", "V"] if name != "GEMMA" else ["S", "A", "V"]
    assert len(pieces) == len(expected) + 1
    assert all(f"{mark} {words}" in piece for mark, piece in zip(expected, pieces, strict=False))
    assert words not in pieces[-1]


def test_each_result_of_a_tool_starts_at_a_mark() -> None:
    """A long result that is cleared later does not take the ones before it along."""
    builder = PromptBuilder(kinds.tokenizer("byte_level", templates.QWEN3))
    reply = {"role": "assistant", "content": "x" * 40, "tool_calls": [call(1), call(2)]}
    user = {"role": "user", "content": "y" * 40}
    one, two = result(1, "one " * 20), result(2, "two " * 20)
    found = builder.chat(Chat([user, reply, one, two], TOOLS))
    backend = kinds.backend("byte_level")
    after = [
        backend.decode(found.ids[m : m + 12].tolist(), skip_special_tokens=False)
        for m in found.marks
    ]
    assert any("one" in text and "two" not in text for text in after)
    assert any("two" in text and "one" not in text for text in after)


WORDS = "some words that make this message longer than marks are apart"
THINKING = {
    "QWEN3": templates.QWEN3,
    "opens": templates.chatml(keep="loop.last", thinks="true"),
}


def follows(builder: PromptBuilder, before: list[dict[str, Any]], text: str) -> Tokens:
    """A prompt with its reply, as the cache has them."""
    backend = kinds.backend("byte_level")
    prompt = builder.chat(Chat(before, TOOLS)).ids
    reply = backend.encode(text, add_special_tokens=False).ids
    return join_ids(prompt, token_ids(reply))


@pytest.mark.parametrize("name", THINKING)
def test_a_prompt_without_the_last_thought_parts_right_after_a_mark(name: str) -> None:
    """Templates leave out what was thought before the last user's message."""
    builder = PromptBuilder(kinds.tokenizer("byte_level", THINKING[name]))
    asked: list[dict[str, Any]] = [
        {"role": "system", "content": WORDS},
        {"role": "user", "content": WORDS},
    ]
    reply = {"role": "assistant", "content": WORDS, "reasoning_content": f"Hm, {WORDS}"}
    opened = "" if name == "opens" else "<think>\n"
    held = follows(builder, asked, f"{opened}Hm, {WORDS}\n</think>\n\n{WORDS}<|im_end|>\n")
    again = builder.chat(Chat([*asked, reply, {"role": "user", "content": f"V {WORDS}"}], TOOLS))
    parted = common_length(held, again.ids)
    before = builder.chat(Chat(asked, TOOLS)).marks
    assert parted < len(held)
    assert before[-1] in again.marks
    opening = builder.text("<|im_start|>assistant\n").ids
    assert before[-1] <= parted <= before[-1] + len(opening)


@pytest.mark.parametrize("name", ["QWEN3", "LLAMA3", "GEMMA", "MISTRAL"])
def test_a_prompt_with_another_last_message_parts_right_after_a_mark(name: str) -> None:
    builder = PromptBuilder(kinds.tokenizer("byte_level", getattr(templates, name)))
    roles = ["user", "assistant", "user", "assistant", "user"]
    chat = [{"role": role, "content": f"{n} {WORDS}"} for n, role in enumerate(roles)]
    whole = builder.chat(Chat(chat))
    for n in (0, 2, 4):
        other = [*chat[:n], {**chat[n], "content": f"{n + 5} else {WORDS}"}]
        parted = common_length(whole.ids, builder.chat(Chat(other)).ids)
        last = max((mark for mark in whole.marks if mark <= parted), default=0)
        opening = whole.ids[last:parted]
        text = kinds.backend("byte_level").decode(opening.tolist(), skip_special_tokens=False)
        assert "some words" not in text


def test_wishes_end_at_marks():
    """Tools and system at the first, the others where the last cache_control mark is, or at the
    prompt's last."""
    keeps = ((0, 3600.0), (3, 300.0))
    assert keep_positions(keeps, (10, 20, 30), 20) == ((10, 3600.0), (20, 300.0))
    assert keep_positions(keeps, (10, 20, 30), None) == ((10, 3600.0), (30, 300.0))
    assert keep_positions(keeps, (30,), None) == ((30, 300.0),)
    assert keep_positions(keeps, (), None) == ()
