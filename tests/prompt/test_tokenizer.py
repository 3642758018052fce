from hypothesis import given
from hypothesis import strategies as st

from mlxcache.prompt.tokenizer import (
    Added,
    added_tokens,
    any_of,
    backend_of,
    control_tokens,
)
from tests.prompt import kinds
from tests.prompt.kinds import Newlines, NoBackend, Wrapped


@given(st.lists(st.text("ab<>", min_size=1, max_size=4), max_size=6), st.text("ab<>", max_size=12))
def test_any_of_finds_the_leftmost_and_there_the_longest(texts: list[str], text: str) -> None:
    """A pattern of many texts matches as a plain search for each would."""
    expected, at = [], 0
    while at < len(text):
        here = [t for t in texts if text.startswith(t, at)]
        expected += [(at, max(here, key=len))] if here else []
        at += max(map(len, here), default=1)
    assert [(m.start(), m.group()) for m in any_of(texts).finditer(text)] == expected


def test_any_of_thousands_compiles_and_finds_the_last() -> None:
    """A vocabulary with thousands of reserved tokens is one pattern."""
    pattern = any_of(f"<unused{i}>" for i in range(6000))
    assert pattern.findall("<unused5999> <unused6000>") == ["<unused5999>"]


def test_control_tokens_are_special_or_written_by_the_template_or_look_it() -> None:
    """HTML tags and blanks that a vocabulary keeps whole are ordinary text."""
    added = [
        Added(1, "<s>", True),
        Added(2, "<tool_call>", False),
        Added(3, "<b>", False),
        Added(4, "   ", False),
        Added(5, "<|fim_prefix|>", False),
        Added(6, "<unused7>", False),
        Added(7, "<think>", False),
    ]
    found = control_tokens(added, "... <tool_call> ...", ["<think>"])
    assert [token.id for token in found] == [1, 2, 5, 6, 7]


def test_without_a_source_whatever_is_in_brackets_is_a_control_token() -> None:
    """A template in Python cannot be searched, so the doubt goes to the safe side."""
    added = [Added(1, "<b>", False), Added(2, "word", False)]
    assert [token.id for token in control_tokens(added, None, [])] == [1]


def test_added_tokens_are_the_backend_s_with_their_flags() -> None:
    """Flags decide how a token is found, so they are read, not assumed."""
    added = {t.text: t for t in added_tokens(kinds.tokenizer("single_words", None))}
    assert added["<s>"].single_word
    assert added["<s>"].special
    assert not added["<think>"].special


def test_a_tokenizer_without_backend_tells_its_added_tokens_through_transformers() -> None:
    """Special tokens are told from others there too."""
    wrapped = Wrapped(NoBackend(kinds.tokenizer("byte_level", None)._tokenizer))
    assert backend_of(wrapped) is None
    added = {t.text: t for t in added_tokens(wrapped)}
    assert added["</s>"].special
    assert added["<think>"].id == kinds.backend("byte_level").token_to_id("<think>")


def test_a_class_with_its_own_encode_hides_the_backend() -> None:
    """Otherwise the change that such a class makes to the text would be missed."""
    assert backend_of(kinds.tokenizer("byte_level", None, cls=Newlines)) is None
    assert backend_of(kinds.tokenizer("byte_level", None)) is not None
