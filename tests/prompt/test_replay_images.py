"""Replies after images are replayed too, and the predicted next turn has the images' ids."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from mlxcache.common_prefix import common_length
from mlxcache.model.output import reader
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.next_turn import append_reply
from mlxcache.types import Chat, Image, Text, Thinking, ToolCall
from tests.prompt.chats import TOOLS
from tests.prompt.families import FAMILIES
from tests.prompt.replaying import Message, Served, fed, results, user

PAD = "<|image_pad|>"
THOUGHT = "The picture shows a file. I read it first. " * 3
CALL = ("Read", {"path": "/tmp/a b.py", "limit": 20})
PARTS = """\
{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for part in m.content -%}
{{- part.text if part.type == 'text' else '<|image_pad|>' -}}
{%- endfor -%}{%- endif -%}"""


class ImageProcessor:
    """An image of n bytes has n tokens, between two marks."""

    image_token = PAD

    def __init__(self, token_id: int):
        self.token_id = token_id

    def text(self, image: Image) -> str:
        return "<|vision_start|>" + PAD * len(image.data) + "<|vision_end|>"

    def grid(self, image: Image) -> tuple[int, int] | None:
        return 3, len(image.data) // 3


def image(show: str) -> Image:
    return Image(b"x" * 9, hashlib.sha256(show.encode()).digest())


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    """A family that takes images where Qwen3 takes text."""
    plain = FAMILIES["qwen3"]
    shown = "{{- '<|im_start|>' + m.role + '\n' -}}" + PARTS + "{{- '<|im_end|>\n' -}}"
    old = "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}"
    assert old in plain.template
    controls = (*plain.controls, PAD, "<|vision_start|>", "<|vision_end|>")
    family = replace(plain, template=plain.template.replace(old, shown), controls=controls)
    monkeypatch.setitem(FAMILIES, "qwen3 with images", family)
    made = Served("qwen3 with images")
    pictures = ImageProcessor(made.tokenizer.get_added_vocab()[PAD])
    made.builder = PromptBuilder(made.tokenizer, processor=pictures, read=reader(made.tokenizer))
    return made


def seen(show: str) -> list[Message]:
    parts: list[Any] = ["See ", image(show), " and read the file."]
    return [{"role": "user", "content": parts}]


def test_a_reply_behind_an_image_is_put_in(served: Served) -> None:
    prompt = served.asked(seen("a"))
    assert len(prompt.images) == 1
    reply, held = served.reply(prompt, served.writes(THOUGHT, "I look.", [CALL]))
    again = served.asked([*seen("a"), reply, *results(reply)])
    assert "replay" in again.rules
    assert [(s.start, s.end) for s in again.images] == [(s.start, s.end) for s in prompt.images]
    assert fed(again, held) <= 64
    assert again.tokens is not None
    assert again.tokens[len(prompt.ids) : len(held)].tolist() == held[len(prompt.ids) :].tolist()
    other = served.asked([*seen("b"), reply, *results(reply)])
    assert common_length(held, other.ids) <= prompt.images[0].start


def test_images_of_later_messages_are_where_they_should_be(served: Served) -> None:
    reply, held = served.reply(served.asked(seen("a")), served.writes(THOUGHT, "", [CALL]))
    shown = {"role": "user", "content": ["It is: ", image("c")]}
    again = served.asked([*seen("a"), reply, *results(reply), shown])
    assert [span.image for span in again.images] == [image("a"), image("c")]
    assert again.tokens is not None
    pad = served.tokenizer.get_added_vocab()[PAD]
    for span in again.images:
        assert set(again.tokens[span.start : span.end].tolist()) == {pad}
    assert fed(again, held) > 0


def test_what_is_computed_ahead_has_the_images(served: Served) -> None:
    prompt = served.asked(seen("a"))
    ids = served.writes(THOUGHT, "It is a file, as I said. " * 4, [])
    pieces, _ = served.pieces(prompt, ids)
    chat = append_reply(Chat(seen("a"), TOOLS), pieces, {}, thoughts=False)
    ahead = served.builder.next_turn(chat, "s")
    assert [span.image for span in ahead.images] == [image("a")]
    said = "".join(p.text for p in pieces if isinstance(p, Text))
    assert not any(isinstance(p, ToolCall) for p in pieces)
    assert any(isinstance(p, Thinking) for p in pieces)
    turn = served.asked([*seen("a"), {"role": "assistant", "content": said}, user("And then?")])
    assert common_length(ahead.ids, turn.ids) == len(ahead.ids) - 1
    assert len(turn.ids) - len(ahead.ids) <= 24
