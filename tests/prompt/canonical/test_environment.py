"""A client's environment after the first message is rendered before it."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcache.prompt.adapt import adapt
from mlxcache.prompt.canonical.canonicaliser import Canonicaliser
from mlxcache.prompt.template import Traits
from mlxcache.types import Chat
from tests.prompt.chats import TOOLS

PLACE = """\
# Environment
You have been invoked in the following environment:\x20
 - Primary working directory: /home/ada/project
 - Platform: linux"""
DEFERRED = """\
The following deferred tools are now available via ToolSearch. Ask for them first:
Fetch
Search"""
DATE = "Today's date is 2026-11-21."
SKILLS = "The following skills are available for use with the Skill tool:\n\n- draw: Draws a chart."
MAIN = "\n\n".join((PLACE, DEFERRED, SKILLS, DATE))
SUB = "\n\n".join((DEFERRED, PLACE, SKILLS, DATE))
AGENTS = """\
Available agent types for the Agent tool:
- look: Looks around. (Tools: *)
- team:plan: Plans. (Tools: Read)"""
TOGETHER = "When you launch multiple agents for independent work, do it at once."
MORE = "Triggers:\nchart\n- mcp__x: Says hello.\nSKIP it else.\n- review"
SERVERS = "# MCP Server Instructions\n\n## notes\nAsk first."
POWERED = "You are powered by the model local."
HOOK = "UserPromptSubmit hook success: submitted at 12:01"
PLAN = "Plan mode is active. Change nothing yet.\n\n## Plan\n- **Default**: one\n\nBe brief."
BEGUN = "SessionStart:startup hook success: begun at 12:00\n\nUse the tests."
READ = (
    'Called the Read tool with the following input: {"file_path":"/a.py"}\n'
    "Result of calling the Read tool:\n1\thello\n2\t\n3\tBe brief."
)
LISTS = "\n\n".join((AGENTS, TOGETHER, SKILLS, MORE))
NO_DATE = [
    LISTS,
    f"{SKILLS}\n\n{MORE}",
    f"{AGENTS}\n\n{TOGETHER}",
    "\n\n".join((AGENTS, TOGETHER, SERVERS, SKILLS)),
    LISTS.replace("Agent tool", "Task tool"),
    f"{PLACE}\n\n{POWERED}",
    DEFERRED,
]
"""Without a date: as versions before 2.1.285 tell it, and the like."""
FULL = "\n\n".join((PLACE, POWERED, DEFERRED, AGENTS, TOGETHER, SERVERS, SKILLS, MORE))
AGAIN = "\n\n".join((DEFERRED, AGENTS, TOGETHER, SKILLS, MORE, SERVERS, PLACE, POWERED))
"""As 2.1.332 tells it at the start of a session, and after a compaction."""


def message(role, text):
    return {"role": role, "content": text}


def texts(made):
    return [m["content"] for m in made.chat.messages]


HEAD = message("system", "You are an agent.")
ASKED = message("user", "Fix the test.")


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        *((text, text) for text in (MAIN, MAIN + "\n", *NO_DATE)),
        (SUB, MAIN),
        (f"{AGAIN}\n\n{DATE}", f"{FULL}\n\n{DATE}"),
        (f"{BEGUN}\n\n{LISTS}", f"{LISTS}\n\n{BEGUN}"),
    ],
)
def test_it_stands_before_the_first_message(sent, told):
    """In each turn, so that turns extend each other, and two sessions begin alike."""
    chat = [HEAD, ASKED, message("system", sent)]
    made = Canonicaliser().canonicalise(Chat(chat, breakpoint=3))
    assert texts(made) == [HEAD["content"], told, ASKED["content"]]
    assert made.rules == ("environment",)
    assert made.chat.breakpoint == 3
    more = [
        *chat,
        message("assistant", "Done."),
        message("user", "Thanks."),
        message("system", "x"),
    ]
    later = Canonicaliser().canonicalise(Chat(more))
    assert texts(later) == [*texts(made), "Done.", "Thanks.", "x"]


def test_a_mark_behind_the_first_message_stays_behind_it():
    made = Canonicaliser().canonicalise(Chat([HEAD, ASKED, message("system", MAIN)], breakpoint=2))
    assert texts(made)[: made.chat.breakpoint] == [HEAD["content"], MAIN, ASKED["content"]]


@pytest.mark.parametrize("rest", [HOOK, PLAN, f"{HOOK}\n\n{PLAN}", f"{PLAN}\n\n{DATE}"])
@pytest.mark.parametrize("told", [LISTS, f"{PLACE}\n\n{POWERED}"])
def test_what_goes_with_the_first_message_stays_behind_it(told, rest):
    """A plan to make, what a program said to it: in each turn, and a mark behind all stays so."""
    chat = [HEAD, ASKED, message("system", f"{told}\n\n{rest}")]
    made = Canonicaliser().canonicalise(Chat(chat, breakpoint=3))
    assert texts(made) == [HEAD["content"], told, ASKED["content"], rest]
    assert made.chat.breakpoint == 4
    later = Canonicaliser().canonicalise(Chat([*chat, message("assistant", "Done.")]))
    assert texts(later) == [*texts(made), "Done."]


@pytest.mark.parametrize("before", [READ, f"{READ}\n\n{BEGUN}", f"{BEGUN}\n\n{READ}"])
@pytest.mark.parametrize("rest", ["", HOOK])
def test_a_file_that_the_first_message_names_stays_behind_it(before, rest):
    """With all that comes before what is told; a list in the file itself has numbered lines."""
    text = "\n\n".join(part for part in (before, LISTS, rest) if part)
    made = Canonicaliser().canonicalise(Chat([HEAD, ASKED, message("system", text)]))
    left = "\n\n".join(part for part in (before, rest) if part)
    assert texts(made) == [HEAD["content"], LISTS, ASKED["content"], left]
    numbered = "\n".join(f"{n}\t{line}" for n, line in enumerate(LISTS.split("\n"), 1))
    chat = Chat([HEAD, ASKED, message("system", f"{READ}\n{numbered}")])
    assert Canonicaliser().canonicalise(chat).chat is chat


SUMMARY = """\
This session is being continued from a previous conversation that ran out of context. The summary \
below covers the earlier portion of the conversation.

Summary:
1. Primary Request: a greeting."""
REMINDED = "<system-reminder>\nAttribution for git commits.\n</system-reminder>"
COMPACT = "SessionStart:compact hook success: Use the tests."


@pytest.mark.parametrize("told", ["{}", "{}\n\n" + DATE])
@pytest.mark.parametrize(
    ("kept", "rest"),
    [
        ((message("assistant", "Done."), message("user", f"{REMINDED}\n\nGo on.")), ""),
        ((message("assistant", "Done."), ASKED), f"{COMPACT}\n\n{HOOK}\n\n{DATE}"),
        (
            (
                message("system", DATE),
                message("assistant", "I look."),
                message("tool", "README.md"),
                message("user", REMINDED),
            ),
            "",
        ),
    ],
    ids=["compact", "hooks", "automatic"],
)
def test_after_a_compaction_it_stands_where_it_stood(told, kept, rest):
    """The client sends it behind the messages that it kept, with its sections in another order."""
    start = Canonicaliser().canonicalise(Chat([HEAD, ASKED, message("system", told.format(FULL))]))
    summary = message("user", f"{REMINDED}\n\n{SUMMARY}")
    again = "\n\n".join(part for part in (told.format(AGAIN), rest) if part)
    chat = [HEAD, summary, *kept, message("system", again)]
    made = Canonicaliser().canonicalise(Chat(chat))
    assert made.rules == ("environment",)
    assert texts(made)[:2] == texts(start)[:2]
    assert list(made.chat.messages[2 : 3 + len(kept)]) == [summary, *kept]
    assert texts(made)[3 + len(kept) :] == [rest] * bool(rest)
    more = [message("assistant", "Done."), message("user", "And?"), message("system", AGAIN)]
    later = Canonicaliser().canonicalise(Chat([*chat, *more]))
    assert texts(later) == [*texts(made), *(m["content"] for m in more)]


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (SUMMARY, DEFERRED),
        (SUMMARY, f"{AGAIN}\n\nBe brief."),
        (SUMMARY.replace("being ", ""), AGAIN),
        (f"Why: {SUMMARY}", AGAIN),
    ],
)
def test_without_a_compaction_or_its_whole_it_stays(first, later):
    """So do messages about tools that became available later: earlier turns had them nowhere."""
    said = message("user", first), message("assistant", SUMMARY), message("user", SUMMARY)
    chat = Chat([HEAD, *said, message("system", later)])
    assert Canonicaliser().canonicalise(chat).chat is chat


def test_a_file_that_the_first_message_names_may_come_between():
    """As reminders in messages of their own; two persons' messages are no such thing."""
    read = message("user", "<system-reminder>\nCalled Read: a.py\n</system-reminder>")
    chat = [HEAD, read, read, ASKED, message("system", MAIN)]
    made = Canonicaliser().canonicalise(Chat(chat))
    assert list(made.chat.messages[2:]) == chat[1:4]
    assert texts(made)[1] == MAIN
    for between in (message("user", f"So: {read['content']}"), message("assistant", "Yes.")):
        other = Chat([HEAD, read, between, ASKED, message("system", MAIN)])
        assert Canonicaliser().canonicalise(other).chat is other


@pytest.mark.parametrize(
    "messages",
    [
        [HEAD, message("user", MAIN)],
        [HEAD, ASKED, message("user", MAIN)],
        [HEAD, ASKED],
        [HEAD, message("user", LISTS), message("assistant", LISTS), message("system", LISTS)],
        [HEAD, ASKED, message("assistant", "Yes."), message("system", MAIN)],
        [HEAD, ASKED, message("user", "And?"), message("system", MAIN)],
        [HEAD, message("system", MAIN), ASKED],
        [HEAD, message("system", LISTS), ASKED],
    ],
)
def test_in_another_place_it_stays(messages):
    chat = Chat(messages)
    assert Canonicaliser().canonicalise(chat).chat is chat


@pytest.mark.parametrize(
    "text",
    [
        f"Be brief.\n\n{MAIN}",
        f"{MAIN}\n\nBe brief.",
        f"# Environment\n\n{DATE}",
        f"Be brief.\n\n{LISTS}",
        f"{LISTS}\n\nBe brief.",
        f"{LISTS}\n\nBe brief.\n\n{HOOK}",
        f"{LISTS}\n\n- Be brief: always.",
        f"Called the Read tool with a.py\n\n{LISTS}",
        f"Be brief.\n\n{READ}\n\n{LISTS}",
        f"{PLACE}\n\n{READ}\n\n{LISTS}",
        f"{READ}\n\n{AGENTS}\n\nA cell of a notebook.\n\n{LISTS}",
        f"{LISTS}\n\n{SKILLS}",
        READ,
        f" {LISTS}",
        BEGUN,
        f"{BEGUN}\n\n{DATE}",
        f"{BEGUN}\n\n{HOOK}\n\n{LISTS}",
        f"{HOOK}\n\n{LISTS}",
        PLAN,
        DATE,
        TOGETHER,
        "- look: Looks around.",
        SERVERS,
    ],
)
def test_with_other_words_in_it_it_stays(text):
    chat = Chat([HEAD, ASKED, message("system", text)])
    assert Canonicaliser().canonicalise(chat).chat is chat


@pytest.mark.parametrize(
    ("told", "fixed"),
    [
        (PLACE, "Environment You have been in the following environment:"),
        (DEFERRED, "The following deferred tools are now available"),
        (AGENTS, "Available agent types for the tool:"),
        (SKILLS, "The following skills are available for use with the tool:"),
    ],
)
def test_each_word_of_its_beginning_counts(told, fixed):
    """But for the tool's name, and how the client came to be where it is."""
    for word in fixed.split():
        for other in ("", word.swapcase()):
            text = re.sub(rf"(?<!\w){word}(?!\w)", other, told, count=1)
            assert text != told
            chat = Chat([HEAD, ASKED, message("system", text)])
            assert Canonicaliser().canonicalise(chat).chat is chat, (word, other)


PARTS = (PLACE, DEFERRED, AGENTS, TOGETHER, SKILLS, MORE, POWERED, DATE, HOOK, PLAN, BEGUN, READ)
OTHERS = ("Be brief.", "- a b: c", "# Environment", "", "The following skills are none:")


def _ordered(some, paragraphs):
    left = iter(paragraphs)
    return all(paragraph in left for paragraph in some if paragraph)


@given(st.lists(st.sampled_from(PARTS + OTHERS), min_size=1, max_size=8))
def test_every_word_is_there_once_and_each_turn_extends_the_one_before(parts):
    """Whatever such a message is made of; what goes with the first message never moves."""
    text = "\n\n".join(parts)
    chat = [HEAD, ASKED, message("system", text)]
    rules = Canonicaliser({"counter": False})
    made = rules.canonicalise(Chat(chat))
    said = texts(made)
    if made.rules:
        told, rest = said[1], said[3:]
        assert said[2] == ASKED["content"]
        assert not any(part in told for part in (HOOK, PLAN, READ))
        assert sorted("\n\n".join([told, *rest]).split("\n\n")) == sorted(text.split("\n\n"))
        assert _ordered("".join(rest).split("\n\n"), text.split("\n\n"))
    else:
        assert made.chat.messages == chat
    more = [*chat, message("assistant", "Done."), message("user", "Thanks.")]
    assert texts(rules.canonicalise(Chat(more))) == [*said, "Done.", "Thanks."]


@pytest.mark.parametrize(
    ("traits", "roles"),
    [
        (Traits(tools=True), ["system", "system", "user"]),
        (Traits(tools=True, system_anywhere=False), ["system", "user", "user"]),
        (Traits(system_anywhere=False, alternates=True), ["system", "user"]),
    ],
)
def test_it_stays_behind_the_tools(traits, roles):
    """Another date, or another folder, then leaves the tools warm, whatever the template takes."""
    chat = Chat([HEAD, ASKED, message("system", MAIN)], TOOLS)
    shown = adapt(Canonicaliser().canonicalise(chat).chat.messages, TOOLS, traits)
    assert [m["role"] for m in shown] == roles
    assert MAIN not in shown[0]["content"]
    assert "".join(m["content"] for m in shown[1:]).startswith(MAIN)
