"""What a client tells of its environment behind the first message is rendered before it."""

import pytest

from mlxcache.prompt.adapt import adapt
from mlxcache.prompt.canonical.canonicaliser import Canonicaliser
from mlxcache.prompt.traits import Traits
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


def message(role, text):
    return {"role": role, "content": text}


def texts(made):
    return [m["content"] for m in made.chat.messages]


HEAD = message("system", "You are an agent.")
ASKED = message("user", "Fix the test.")


@pytest.mark.parametrize("told", [MAIN, SUB, MAIN + "\n"])
def test_it_stands_before_the_first_message(told):
    """In each turn, so that turns extend each other, and two sessions begin alike."""
    chat = [HEAD, ASKED, message("system", told)]
    made = Canonicaliser().canonical(Chat(chat, breakpoint=3))
    assert texts(made) == [HEAD["content"], told, ASKED["content"]]
    assert made.rules == ("environment",)
    assert made.chat.breakpoint == 3
    more = [
        *chat,
        message("assistant", "Done."),
        message("user", "Thanks."),
        message("system", "x"),
    ]
    later = Canonicaliser().canonical(Chat(more))
    assert texts(later) == [*texts(made), "Done.", "Thanks.", "x"]


@pytest.mark.parametrize(
    "messages",
    [
        [HEAD, message("user", MAIN)],
        [HEAD, ASKED, message("user", MAIN)],
        [HEAD, ASKED, message("assistant", "Yes."), message("system", MAIN)],
        [HEAD, ASKED, message("user", "And?"), message("system", MAIN)],
        [HEAD, ASKED, message("system", f"Be brief.\n\n{MAIN}")],
        [HEAD, ASKED, message("system", f"{MAIN}\n\nBe brief.")],
        [HEAD, ASKED, message("system", MAIN.replace("invoked", "started"))],
        [HEAD, ASKED, message("system", "\n\n".join((DEFERRED, SKILLS, DATE)))],
        [HEAD, ASKED, message("system", f"# Environment\n\n{DATE}")],
        [HEAD, message("system", MAIN), ASKED],
    ],
)
def test_what_is_not_just_so_stays(messages):
    """A person's text, another place, other words in it."""
    chat = Chat(messages)
    assert Canonicaliser().canonical(chat).chat is chat


def test_it_can_be_switched_off():
    """As any rule."""
    chat = Chat([HEAD, ASKED, message("system", MAIN)])
    assert Canonicaliser({"environment": False}).canonical(chat).chat is chat


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
    shown = adapt(Canonicaliser().canonical(chat).chat.messages, TOOLS, traits)
    assert [m["role"] for m in shown] == roles
    assert MAIN not in shown[0]["content"]
    assert "".join(m["content"] for m in shown[1:]).startswith(MAIN)
