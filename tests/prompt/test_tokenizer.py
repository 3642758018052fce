from hypothesis import given
from hypothesis import strategies as st

from mlxcache.prompt.tokenizer import (
    Added,
    any_of,
    control_tokens,
)


@given(st.lists(st.text("ab<>", min_size=1, max_size=4), max_size=6), st.text("ab<>", max_size=12))
def test_any_of_finds_the_leftmost_and_there_the_longest(texts: list[str], text: str) -> None:
    expected, at = [], 0
    while at < len(text):
        here = [t for t in texts if text.startswith(t, at)]
        expected += [(at, max(here, key=len))] if here else []
        at += max(map(len, here), default=1)
    assert [(m.start(), m.group()) for m in any_of(texts).finditer(text)] == expected


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
