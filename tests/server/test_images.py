"""Images over both APIs, by the SDKs, on a server with a model that takes them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.muse.toy import picture
from tests.server.api import CHAT, COUNT, MESSAGES, Api
from tests.server.conftest import Start


@pytest.fixture(scope="module")
def muse(start: Start, toy_muse: Path) -> Api:
    return start("muse", toy_muse, "--trust-remote-code", "--prefill-chunk", "64")


def part(seed: int, **size: int) -> dict[str, Any]:
    data = base64.b64encode(picture(seed, **size)).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def block(seed: int, **size: int) -> dict[str, Any]:
    data = base64.b64encode(picture(seed, **size)).decode()
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": data},
    }


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def see(image: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": "What is here? "}, image]}


def test_turns_of_a_conversation_about_images_are_warm(muse: Api) -> None:
    first = muse.chat([see(part(1))])
    history = [see(part(1)), said(first.text, "assistant")]
    second = muse.chat([*history, see(part(2, width=280))])
    third = muse.chat([*history, see(part(2, width=280)), said("So?", "assistant"), said("And?")])
    assert first.prompt > first.fed - 1 > 20
    assert second.cached > 20
    assert third.cached > second.cached + 40
    assert muse.chat([*history, see(part(2, width=280))]).text == second.text


def test_another_image_of_the_same_size_is_another_prompt(muse: Api) -> None:
    one, other = muse.chat([see(part(11))]), muse.chat([see(part(12))])
    again = muse.chat([see(part(11))])
    assert one.prompt == other.prompt
    assert other.cached < 20
    assert one.text != other.text
    assert again.text == one.text
    assert again.cached == again.prompt - 1


def test_both_apis_make_the_same_prompt_of_an_image(muse: Api) -> None:
    chat, message = muse.chat([see(part(21))]), muse.message([see(block(21))])
    assert message.prompt == chat.prompt
    assert message.cached == chat.prompt - 1
    assert message.text == chat.text


def test_the_sdks_stream_about_images(muse: Api) -> None:
    gpt = openai.OpenAI(base_url=f"{muse.url}/v1", api_key="any", max_retries=0)
    messages: Any = [see(part(31))]
    chunks = gpt.chat.completions.create(
        model="any", messages=messages, max_tokens=9, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    claude = anthropic.Anthropic(base_url=muse.url, api_key="any", max_retries=0)
    blocks: Any = [see(block(31))]
    wishes: Any = {"max_tokens": 9, "extra_body": {"temperature": 0}}
    with claude.messages.stream(model="any", messages=blocks, **wishes) as reply:
        assert "".join(reply.text_stream) == text
        final = reply.get_final_message()
    assert (final.usage.cache_read_input_tokens or 0) > 20


@pytest.mark.parametrize("shown", [part, block])
def test_a_prompt_with_images_can_be_warmed(muse: Api, shown: Callable[[int], Any]) -> None:
    """In the form of each API, also where only the image tells which it is."""
    messages = [see(shown(51 if shown is part else 52))]
    warmed = muse.post("/v1/cache/warm", {"messages": messages}).json()
    assert warmed["fed_tokens"] > 20
    turn = muse.chat(messages) if shown is part else muse.message(messages)
    assert turn.cached >= warmed["prompt_tokens"] - 1


def test_a_count_counts_an_images_tokens(muse: Api) -> None:
    body: Any = {"model": "m", "messages": [see(block(41))]}
    with_image = muse.post(COUNT, body).json()["input_tokens"]
    body["messages"] = [said("What is here? ")]
    assert with_image - muse.post(COUNT, body).json()["input_tokens"] == 22


@pytest.mark.parametrize("data", ["eA==", base64.b64encode(picture(1)[:90]).decode()])
def test_what_is_no_picture_is_a_bad_request(muse: Api, data: str) -> None:
    url = f"data:image/png;base64,{data}"
    image = {"type": "image_url", "image_url": {"url": url}}
    assert muse.post(CHAT, {"messages": [see(image)]}).status_code == 400
    source = {"type": "base64", "media_type": "image/png", "data": data}
    body = {"model": "m", "max_tokens": 9, "messages": [see({"type": "image", "source": source})]}
    response = muse.post(MESSAGES, body)
    assert response.status_code == 400
    said = "messages[0].content[1]: An image cannot be read"
    assert response.json()["error"]["message"].startswith(said)
