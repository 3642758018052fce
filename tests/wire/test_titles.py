"""Titles of conversations come from text that users typed."""

import pytest

from mlxcache.types import Image
from mlxcache.wire.titles import MAX_TITLE, title_from_messages, title_from_text


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Fix the bug", "Fix the bug"),
        ("  Fix\n\n the\tbug \u2028 now ", "Fix the bug now"),
        ("<system-reminder>\nToday is Monday.\n</system-reminder>\n\nFix it", "Fix it"),
        ("<a-b>x</a-b><c_d k='v'>y</c_d> Fix it", "Fix it"),
        ("<environment_context><cwd>/x</cwd></environment_context>\nGo on", "Go on"),
        ("<task>\nAdd tests\n</task><environment_details>x</environment_details>", "Add tests"),
        ("<user_query>Why?</user_query>", "Why?"),
        ("<system-reminder>never closed, and long", None),
        ("a < b and c > d?", "a < b and c > d?"),
        ("red \x1b[31mtext\x00\x7f\u202e\u200b", "red [31mtext"),
        ("half \ud83d of a pair", "half of a pair"),
        ("👩\u200d💻 works", "👩\u200d💻 works"),
        ("", None),
        (" \n\x00 ", None),
    ],
)
def test_a_title_is_one_clean_line_of_what_a_person_wrote(text, title):
    """Machine-made elements are skipped; those around typed text are removed."""
    assert title_from_text(text) == title


def test_a_long_title_is_cut_and_says_so():
    """At 80 characters."""
    for text in ("x" * 10**6, "word " * 10**5):
        title = title_from_text(text)
        assert title is not None
        assert len(title) <= MAX_TITLE
        assert title.endswith("…")


def test_the_first_message_with_words_of_a_person_gives_the_title():
    """Not a system message, nor one of machine-made elements only."""
    messages = [
        {"role": "system", "content": "You are"},
        {"role": "user", "content": "<command-name>/init</command-name>"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Fix it"},
    ]
    assert title_from_messages(messages) == "Fix it"
    assert title_from_messages(messages[:3]) is None


def test_words_beside_an_image_are_the_title():
    """A message of images only is skipped."""
    image = Image(b"x", b"y" * 32)
    shown = {"role": "user", "content": ["Look at", image, "this"]}
    assert title_from_messages([shown]) == "Look at this"
    bare = {"role": "user", "content": [image]}
    assert title_from_messages([bare, {"role": "user", "content": "And?"}]) == "And?"
