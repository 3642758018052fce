"""Signatures bring back the reasoning that a client was not shown."""

import base64
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcache.errors import ContextLengthExceeded
from mlxcache.wire import anthropic_request, anthropic_types
from mlxcache.wire.responses_request import Conversation, Toolbox, to_chat
from mlxcache.wire.responses_types import ResponsesRequest
from mlxcache.wire.signatures import SignatureReader, sign_thinking


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_a_signature_carries_the_text_it_signs(text: str) -> None:
    assert SignatureReader().recover("", sign_thinking(text)) == text


def test_what_the_client_shows_wins_over_the_signature() -> None:
    assert SignatureReader().recover("edited", sign_thinking("original")) == "edited"


@given(st.text())
def test_a_foreign_signature_counts_as_none(signature: str) -> None:
    assert SignatureReader().recover("", signature) == ""
    assert SignatureReader().recover("shown", signature) == "shown"


@given(st.integers(0), st.characters(codec="ascii"))
def test_a_damaged_signature_never_gives_another_text(at: int, char: str) -> None:
    whole = sign_thinking("First the file is read, then the tests are run.")
    at %= len(whole)
    damaged = whole[:at] + char + whole[at + 1 :]
    assert SignatureReader().recover("", damaged) in (
        "",
        "First the file is read, then the tests are run.",
    )


def test_a_cut_signature_gives_nothing() -> None:
    whole = sign_thinking("some words " * 40)
    assert {SignatureReader().recover("", whole[:n]) for n in range(len(whole) - 4)} == {""}


def test_a_signature_that_would_unpack_to_gigabytes_is_refused() -> None:
    prefix, digest, _ = sign_thinking("x").split(".")
    bomb = base64.urlsafe_b64encode(zlib.compress(bytes(64 << 20), 9)).decode()
    with pytest.raises(ContextLengthExceeded):
        SignatureReader().recover("", f"{prefix}.{digest}.{bomb}")


@pytest.mark.parametrize("forged", [False, True])
def test_signatures_of_a_conversation_unpack_to_one_prompt(forged: bool) -> None:
    signature = sign_thinking(" " * (3 << 20))
    if forged:  # the digest is checked after the text was restored
        signature = signature.replace(".", ".0", 1)
    reader = SignatureReader()
    assert len(reader.recover("", signature)) == len(reader.recover("", signature))
    with pytest.raises(ContextLengthExceeded):
        reader.recover("", signature)
    assert reader.recover("", sign_thinking("short")) == "short"


@pytest.mark.parametrize("type", ["compaction", "reasoning"])
def test_a_body_of_forged_signatures_is_refused(type: str) -> None:
    item = {"type": type, "encrypted_content": sign_thinking(" " * (5 << 20))}
    body = ResponsesRequest(model="m", input=[item, item])
    with pytest.raises(ContextLengthExceeded):
        to_chat(body, Conversation([item, item]), Toolbox(()))


def test_an_anthropic_body_of_forged_signatures_is_refused() -> None:
    block = {"type": "thinking", "thinking": "", "signature": sign_thinking(" " * (5 << 20))}
    body = msgspec.convert(
        {
            "model": "m",
            "max_tokens": 1,
            "messages": [{"role": "assistant", "content": [block] * 2}],
        },
        anthropic_types.Request,
    )
    with pytest.raises(ContextLengthExceeded):
        anthropic_request.to_chat(body)


def test_a_signature_is_ascii_without_white_space_and_shorter_than_long_prose() -> None:
    text = "The next step is to look at what the function returns. " * 200
    assert sign_thinking(text).isascii()
    assert not any(c.isspace() for c in sign_thinking(text))
    assert len(sign_thinking(text)) < len(text)
