"""Signatures bring back the reasoning that a client was not shown."""

import base64
import zlib

from hypothesis import given
from hypothesis import strategies as st

from mlxcache.wire.signatures import recover_thinking, sign_thinking


@given(st.text(alphabet=st.characters(codec="utf-8")))
def test_a_signature_carries_the_text_it_signs(text: str) -> None:
    assert recover_thinking("", sign_thinking(text)) == text


def test_what_the_client_shows_wins_over_the_signature() -> None:
    assert recover_thinking("edited", sign_thinking("original")) == "edited"


@given(st.text())
def test_a_foreign_signature_counts_as_none(signature: str) -> None:
    assert recover_thinking("", signature) == ""
    assert recover_thinking("shown", signature) == "shown"


@given(st.integers(0), st.characters(codec="ascii"))
def test_a_damaged_signature_never_gives_another_text(at: int, char: str) -> None:
    whole = sign_thinking("First the file is read, then the tests are run.")
    at %= len(whole)
    damaged = whole[:at] + char + whole[at + 1 :]
    assert recover_thinking("", damaged) in ("", "First the file is read, then the tests are run.")


def test_a_cut_signature_gives_nothing() -> None:
    whole = sign_thinking("some words " * 40)
    assert {recover_thinking("", whole[:n]) for n in range(len(whole) - 4)} == {""}


def test_a_signature_that_would_unpack_to_gigabytes_is_refused() -> None:
    prefix, digest, _ = sign_thinking("x").split(".")
    bomb = base64.urlsafe_b64encode(zlib.compress(bytes(64 << 20), 9)).decode()
    assert recover_thinking("", f"{prefix}.{digest}.{bomb}") == ""


def test_a_signature_is_ascii_without_white_space_and_shorter_than_long_prose() -> None:
    text = "The next step is to look at what the function returns. " * 200
    assert sign_thinking(text).isascii()
    assert not any(c.isspace() for c in sign_thinking(text))
    assert len(sign_thinking(text)) < len(text)
