"""Titles of conversations come from text that users typed."""

import pytest

from mlxcache.types import Image
from mlxcache.wire.titles import MAX_TITLE, title_from_messages, title_from_text

SETUP = "This is the Qwen Code. We are setting up the context for our chat.\nToday is Sunday."

TASK = "### Task:\nGive it a title.\n### Chat History:\n<chat_history>\n{}\n</chat_history>"
CODEX = "Generate a concise, single-line task title of at most 36 characters and short. {}"
FILES = (
    "### Task:\nRespond to the user query using the provided context, in <b>.\n<context>\nUSER: "
)


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
        ("<session>\nWhy?\n</session>\n\nWrite the title in the language of", "Why?"),
        (f"<system-reminder>{'skill ' * 20_000}</system-reminder>\nFix it", "Fix it"),
        (SETUP, None),
        ("# USER\nFix it\n# ASSISTANT\nDone.\n# USER\nMore", "Fix it"),
        (TASK.format("USER: Fix it\nASSISTANT: Done.\nUSER: More\nASSISTANT: Yes."), "Fix it"),
        (TASK.format("ASSISTANT: Yes.\nUSER: Fix\n it\nASSISTANT: "), "Fix it"),
        (TASK.format("USER: Fix it"), "Fix it"),
        ("### Task:\n<chat_history>\nASSISTANT: x", "### Task: <chat_history> ASSISTANT: x"),
        (f"{FILES}</context>\n\nFix it", "Fix it"),
        (FILES + "x" * 10**6, FILES[:79].replace("\n", " ") + "…"),
        ("### Task:\nFix it", "### Task: Fix it"),
        (f"<system-reminder>\n{SETUP}\n</system-reminder>\n\nFix it", "Fix it"),
        ("This is the CLI. We are setting up it", "This is the CLI. We are setting up it"),
        ("Generate a title for this conversation:\n", None),
        (CODEX.format("Do not answer it.\n\nUser prompt:\nFix it\nnow"), "Fix it now"),
        (CODEX.format("Do not answer it.\n\nConversation:\nuser: Fix it"), None),
        ("Generate a concise task title for it", "Generate a concise task title for it"),
        ("Generate a title for this page: one line", "Generate a title for this page: one line"),
        ('"Say hello to it"', "Say hello to it"),
        ('"a" or "b"', '"a" or "b"'),
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


def test_messages_that_a_client_writes_before_the_first_typed_one_are_skipped():
    """The context of Qwen Code's first versions; OpenCode's request for a title."""
    answer = {"role": "assistant", "content": "Got it. Thanks for the context!"}
    asked = {"role": "user", "content": "Fix it"}
    for text in (SETUP, "Generate a title for this conversation:\n"):
        messages = [{"role": "user", "content": text}, answer, asked]
        assert title_from_messages(messages) == "Fix it"


def test_aiders_examples_files_and_rules_are_no_title():
    """Its examples end with a message of their own; its rules follow the newest message."""
    files = "I have *added these files to the chat* so you can go ahead and edit them.\n\na.py\n"
    texts = [
        "Change get_factorial() to use math.factorial",
        "Refactor hello() into its own file.",
        "I switched to a new code base. Please don't consider the above files or try to edit them.",
        "Here are summaries of some files present in my git repository.\nDo not propose changes",
        files,
        "Fix the parser",
    ]
    rules = (
        "To suggest changes to a file you MUST return the entire content",
        "# *SEARCH/REPLACE block* Rules:\n\nEvery",
        "# File editing rules:\n\nReturn edits",
    )
    for after in ("", *(f"\n\n{rule}" for rule in rules)):
        messages = [{"role": "user", "content": text} for text in [*texts[:-1], texts[-1] + after]]
        assert title_from_messages(messages) == "Fix the parser"
    assert title_from_messages([{"role": "user", "content": texts[0]}]) == texts[0]
