"""Images of both APIs are read if the model takes them."""

from __future__ import annotations

import base64
import hashlib
import time
from typing import Any, ClassVar

import msgspec
import pytest

from mlxcache.errors import BadRequest
from mlxcache.types import Chat, Image
from mlxcache.wire import anthropic_types, images
from mlxcache.wire.anthropic_request import to_chat
from mlxcache.wire.openai_request import to_chat as openai_chat
from mlxcache.wire.openai_types import ChatRequest
from tests.wire.anthropic_bodies import assistant, result, text, use, user

DATA = base64.b64encode(b"a picture").decode()
SHOWN = Image(b"a picture", hashlib.sha256(b"a picture").digest())
URL = f"data:image/png;base64,{DATA}"
PART = {"type": "image_url", "image_url": {"url": URL}}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}
CALLS = {
    "role": "assistant",
    "tool_calls": [{"id": i, "function": {"name": "look", "arguments": "{}"}} for i in "12"],
}


def tool(id: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": list(parts)}


def openai(*messages: dict[str, Any], images: bool = True) -> Chat:
    body = msgspec.convert({"messages": list(messages)}, ChatRequest)
    return openai_chat(body, images=images)


def anthropic(*messages: dict[str, Any], images: bool = True, **body: Any) -> Chat:
    whole = {"model": "m", "messages": list(messages), **body}
    return to_chat(msgspec.convert(whole, anthropic_types.Conversation), images=images)[0]


def test_many_parts_are_joined_in_a_time_that_grows_with_their_number() -> None:
    """The event loop waits for it."""

    def seconds(count: int) -> float:
        began = time.process_time()
        assert len(images.join_items(["ab"] * count, "\n")) == 3 * count - 1
        return time.process_time() - began

    assert seconds(400_000) < 40 * seconds(40_000)


class TestOpenAI:
    @pytest.mark.parametrize(
        "part",
        [
            PART,
            {"type": "image_url", "image_url": URL},
            {"type": "input_image", "image_url": URL},
            {"type": "image", "image": URL},
            {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
            {"type": "image_url", "image_url": {"url": f"data:;base64,{DATA[:4]}\n{DATA[4:]}"}},
            {"type": "image_url", "image_url": f"data:image/png;charset=utf-8;base64,{DATA}"},
            {"type": "image_url", "image_url": f"DATA:image/png;BASE64,{DATA}"},
        ],
    )
    def test_an_image_stands_between_its_texts(self, part: dict[str, Any]) -> None:
        chat = openai({"role": "user", "content": [text("a"), text("b"), part, text("c")]})
        assert chat.messages[0]["content"] == ["ab", SHOWN, "c"]

    def test_texts_alone_are_one_text(self) -> None:
        chat = openai({"role": "user", "content": [text("a"), text("b")]})
        assert chat.messages[0]["content"] == "ab"

    def test_a_result_has_its_texts_and_images_in_order(self) -> None:
        chat = openai(user("a"), CALLS, tool("1", text("one"), PART), tool("2", PART), user("b"))
        assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "tool", "user"]
        assert [m["content"] for m in chat.messages[2:]] == [["one", SHOWN], [SHOWN], "b"]

    def test_an_image_knows_its_place(self) -> None:
        chat = openai(user("a"), CALLS, tool("1", text("one"), PART))
        assert chat.messages[-1]["content"][1].where == "messages[2].content[1]"

    def test_there_is_a_limit_to_their_number(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(images, "MAX_IMAGES", 3)
        message = {"role": "user", "content": [PART, PART]}
        assert len(openai({"role": "user", "content": [PART] * 3}).messages) == 1
        with pytest.raises(BadRequest, match="at most 3 images"):
            openai(message, assistant("b"), message)


class TestAnthropic:
    def test_an_image_stands_between_its_texts(self) -> None:
        chat = anthropic(user("a", "b", BLOCK, "c"))
        assert chat.messages[0]["content"] == ["a\n\nb", SHOWN, "c"]

    def test_a_mark_on_an_image_counts(self) -> None:
        marked = BLOCK | {"cache_control": {"type": "ephemeral"}}
        assert anthropic(user("a", marked), assistant("b"), user("c")).breakpoint == 1

    def test_a_result_has_its_texts_and_images_in_order(self) -> None:
        chat = anthropic(
            user("a"),
            assistant(use("1"), use("2")),
            user(result([text("one"), BLOCK], id="1"), result([BLOCK], id="2"), "And?"),
        )
        assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "tool", "user"]
        assert [m["content"] for m in chat.messages[2:]] == [["one", SHOWN], [SHOWN], "And?"]
        assert chat.messages[2]["content"][1].where == "messages[2].content[0].content[1]"

    def test_a_failed_tool_shows_its_image_too(self) -> None:
        for content, expected in (
            ([text("x"), BLOCK], ["Error: x", SHOWN]),
            ([BLOCK, text("x")], ["Error: ", SHOWN, "x"]),
            ("x", "Error: x"),
            ([], "Error: "),
        ):
            failed = result(content, id="1", is_error=True)
            chat = anthropic(user("a"), assistant(use("1")), user(failed))
            assert chat.messages[2]["content"] == expected


class TestDocuments:
    SHOWS: ClassVar[dict[str, Any]] = {
        "type": "document",
        "title": "T",
        "source": {"type": "content", "content": [text("a"), text("b"), BLOCK, text("c")]},
    }

    def test_the_images_of_a_document_are_at_their_place(self) -> None:
        content = anthropic(user("See", self.SHOWS, "?")).messages[0]["content"]
        assert content == ["See\n\nT\n\na\n\nb", SHOWN, "c\n\n?"]

    def test_in_a_tools_result_they_are_at_their_place_too(self) -> None:
        chat = anthropic(user("a"), assistant(use()), user(result([self.SHOWS])))
        assert chat.messages[2]["content"] == ["T\n\na\n\nb", SHOWN, "c"]
