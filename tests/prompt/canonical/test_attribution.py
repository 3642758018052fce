"""The attribution line is removed; everything that only looks like it stays."""

import pytest

from mlxcache.prompt.canonical.canonicaliser import Canonicaliser
from mlxcache.types import Chat

LINES = [
    "x-anthropic-billing-header: cc_version=2.1.329.0a8; cc_entrypoint=cli; cch=36ee5; "
    "cc_is_subagent=true;",
    "x-anthropic-billing-header: cc_version=2.1.329.0a8; cc_entrypoint=cli;",
    "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=sdk-cli; cch=0aaa9;",
    "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch=fa690; "
    "cc_workload=cron",
    "x-anthropic-billing-header: cc_version=2.1.100.7b4;cc_entrypoint=cli;cch=eb6c6;",
]
PROMPT = "You are an agent.\n\nBe brief."


def system(text, role="system"):
    return {"role": role, "content": text}


def rendered(*messages):
    return Canonicaliser().canonicalise(Chat((*messages, {"role": "user", "content": "hi"})))


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("between", ["\n\n", "\n", "\r\n"])
def test_the_line_goes_from_the_start_of_a_system_prompt(line, between):
    """As a block of its own and as the first line of a joined string: the same prompt is left."""
    made = rendered(system(line + between + PROMPT))
    assert made.chat.messages[0]["content"] == PROMPT
    assert made.rules == ("attribution",)


def test_the_line_goes_where_the_whole_prompt_is_one_line():
    """As anyclaude joins it: the same prompt is left for every checksum."""
    whole = "You are an agent. cc=1; Be brief."
    for line in (line for line in LINES if line.endswith(";")):
        made = rendered(system(f"{line} {whole}"))
        assert made.chat.messages[0]["content"] == whole
        assert made.rules == ("attribution",)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_message_that_is_nothing_but_the_line_goes(role):
    """As some proxies send each block."""
    made = rendered(system(LINES[0], role), system(PROMPT, role))
    assert [m["content"] for m in made.chat.messages] == [PROMPT, "hi"]


@pytest.mark.parametrize(
    "text",
    [
        f"{PROMPT}\n{LINES[0]}",
        f" {LINES[0]}\n{PROMPT}",
        LINES[0] + " You are an agent.\nBe brief.",
        LINES[0] + "You are an agent.",
        LINES[0].removesuffix(";") + " You are an agent.",
        "x-anthropic-billing-header: is a line that some clients send.\n" + PROMPT,
        "x-anthropic-billing-header:\n" + PROMPT,
        "x-anthropic-billing-header: cc_version=2.1.329.0a8; name=me;\n" + PROMPT,
        "X-Anthropic-Billing-Header: cc_version=2.1.329.0a8;\n" + PROMPT,
        "x-anthropic-billing-header: cc_version=2.1 and more; cch=1;\n" + PROMPT,
        "> " + LINES[0],
    ],
)
def test_what_only_looks_like_it_stays(text):
    made = rendered(system(text))
    assert made.chat.messages[0]["content"] == text
    assert made.rules == ()


def test_a_prompt_that_is_nothing_but_noise_is_left_alone():
    chat = Chat((system(LINES[0]),))
    assert Canonicaliser().canonicalise(chat).chat is chat


def test_breakpoints_stay_behind_the_message_that_they_stood_behind():
    """Dropping a message moves what is counted in messages."""
    chat = Chat((system(LINES[0]), system(PROMPT), {"role": "user", "content": "hi"}), breakpoint=2)
    assert Canonicaliser().canonicalise(chat).chat.breakpoint == 1
