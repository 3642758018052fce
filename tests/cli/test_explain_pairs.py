"""`mlxcache explain` on more pairs: in OpenAI's format, with other templates, with two causes."""

from __future__ import annotations

import itertools
import random
from functools import cache
from typing import Any

import pytest

from mlxcache.explain.causes import advice_for
from mlxcache.prompt.builder import PromptBuilder
from tests.cli.test_explain import (
    EDITED,
    PAIRS,
    RAW,
    SYSTEM,
    TOOLS,
    Body,
    Pair,
    as_openai,
    command,
    first,
    following,
    head,
    openai,
    said,
    text,
    tokenizer,
    tool,
)
from tests.prompt import families

OTHERS = ("qwen3.5", "gpt-oss", "gemma3")
"""Templates with arguments that are not JSON, tools after the system text, and no tools."""


@cache
def builder(name: str) -> PromptBuilder:
    made = tokenizer() if name == "chatml" else families.tokenizer(name)
    return PromptBuilder(made, rules=RAW.rules)


@pytest.fixture(autouse=True)
def template(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Use the template of the test's parameter, or one that keeps thinking."""
    name = str(getattr(request, "param", "chatml"))
    monkeypatch.setattr(command, "make_builder", lambda settings: builder(name))
    return name


def dropped(start: int, end: int) -> Any:
    def change(body: Body) -> None:
        del body["messages"][start:end]

    return change


def schema(body: Body) -> None:
    properties = body["tools"][1]["input_schema"]["properties"]
    body["tools"][1]["input_schema"]["properties"] = {**properties, "n": {"type": "integer"}}


def spaced(body: Body) -> None:
    body["tools"][1]["description"] += " "


def dated(body: Body) -> None:
    body["tools"][1]["description"] = "Today's date is 2026-11-22. " + text_of(body)


def text_of(body: Body) -> str:
    return str(body["tools"][1]["description"])


def other_call(body: Body) -> None:
    body["messages"][1]["content"][1]["input"] = {"path": "b.py", "n": 1}


def edited_behind_new(body: Body) -> None:
    said(3, lambda t: "#" + t[1:])(body)
    body["messages"].insert(3, {"role": "system", "content": "The task tools were not used."})


INSTRUCTION = {"role": "user", "content": "Extract what is worth to be remembered. " + text(9, "i")}
FILES = [{"role": "user", "content": f"*These are the files.*\n{text(30, 'f')}"},
         {"role": "assistant", "content": "Ok."}]  # fmt: skip


def reading() -> Body:
    """A sub-agent's request: the history, and then its instruction."""
    body = first()
    body["messages"][-1:] = [INSTRUCTION]
    return body


def read_more(body: Body) -> None:
    """Its next request, with newer history, and without what it did the last time."""
    asked, said = ({"role": role, "content": text(9, role)} for role in ("user", "assistant"))
    body["messages"][4:] = [asked, said, INSTRUCTION]


def with_files() -> Body:
    """Files between the history and the newest message."""
    body = first()
    body["messages"][-1:-1] = FILES
    return body


def filed_after(body: Body) -> None:
    """The next turn: the history has grown, and the files, one of them edited, come after it."""
    *before, new = [m for m in body["messages"] if m not in FILES]
    files = [{**FILES[0], "content": FILES[0]["content"] + "\nA new line."}, FILES[1]]
    body["messages"] = [*before, *files, new]


REMINDER = "<system-reminder>\nThe current date is: Sunday. It may differ from the first.\n"


def reminded_last() -> Body:
    """A reminder in the newest message."""
    body = first()
    said(4, reminder_before)(body)
    return body


SNAPSHOT = """
Git snapshot at conversation start. This snapshot is frozen in time.
```text
git: Current branch: main
git: Status:
git: (clean)
git: Recent commits:
git: 1a2b3c4 Add a reader
```
"""


def with_snapshot() -> Body:
    """Qwen Code's Git status, between other texts."""
    body = first()
    body["system"] = [{"type": "text", "text": f"You help.\n{SNAPSHOT}\n{text(9, 'more')}"}]
    return body


RULES = "\nReply with blocks of the lines to search and to replace, and nothing else."


def ruled() -> Body:
    """Rules at the end of the newest message, without marks."""
    body = first()
    said(4, lambda t: t + RULES)(body)
    return body


def ruled_anew(body: Body) -> None:
    """The next turn: the rules are in the newest message only."""
    said(4, lambda t: t.removesuffix(RULES))(body)
    said(6, lambda t: t + RULES)(body)


def reminder_before(asked: str) -> str:
    return f"{REMINDER}</system-reminder>\n{asked}"


def reminded_anew(body: Body) -> None:
    """The next turn: the reminder is in the newest message only."""
    said(4, lambda t: t.removeprefix(reminder_before("")))(body)
    said(6, reminder_before)(body)


MORE = [
    Pair("reminder moved", "moved", "reminder_moved", "messages[5] user", reminded_anew,
         base=reminded_last),
    Pair("reminder gone", EDITED, "text", "messages[5] user",
         said(4, lambda t: t.removeprefix(reminder_before(""))), base=reminded_last),
    Pair("instruction after the history", "moved", "history_inserted", "messages[5] user",
         read_more, base=reading),
    Pair("snapshot's files", SYSTEM, "git_status", "system",
         head(0, "(clean)", "M a.py\ngit: ?? b"), base=with_snapshot),
    Pair("snapshot's commits", SYSTEM, "git_status", "system",
         head(0, "1a2b3c4 Add", "77ee001 Fix"), base=with_snapshot),
    Pair("rules in the newest message", "moved", "reminder_moved", "messages[5] user", ruled_anew,
         base=ruled),
    Pair("files after the history", "moved", "history_inserted", "messages[5] user", filed_after,
         base=with_files),
    Pair("front of history gone", EDITED, "message_dropped", "messages[1] user", dropped(0, 4)),
    Pair("turns gone", EDITED, "message_dropped", "messages[2] user", dropped(1, 4)),
    Pair("call and result gone", EDITED, "message_dropped", "messages[2] assistant", dropped(1, 3)),
    Pair("inserted, edited", EDITED, "message_inserted", "messages[4] system", edited_behind_new),
    Pair("schema", TOOLS, "tool_changed", "tools[1] Edit", schema),
    Pair("description's blank", TOOLS, "whitespace", "tools[1] Edit", spaced),
    Pair("description's date", TOOLS, "date", "tools[1] Edit", dated),
    Pair("no tools", TOOLS, "tool_removed", "tools[0] Bash", lambda b: b.update(tools=[])),
    Pair("other tools", TOOLS, "tool_changed", "tools[0] A", lambda b: b.update(tools=[tool("A")])),
    Pair("no system", SYSTEM, "attribution", "system", lambda b: b.update(system=[])),
    Pair("block gone", SYSTEM, "text", "system", lambda b: b["system"].pop()),
    Pair(
        "block added",
        SYSTEM,
        "text",
        "system",
        lambda b: b["system"].append({"type": "text", "text": "Be brief."}),
    ),
    Pair("clock", SYSTEM, "date", "system", head(2, "2026-11-21.", "2026-11-21 10:31:02.")),
    Pair("client's version", SYSTEM, "attribution", "system", head(0, "2.1.329", "2.1.330")),
    Pair("argument", EDITED, "tool_calls", "messages[2] assistant", other_call),
    Pair("blank at a reply's end", EDITED, "whitespace", "messages[4] assistant",
         said(3, lambda t: f"{t}\n")),
    Pair("blank of another kind", EDITED, "whitespace", "messages[4] assistant",
         said(3, lambda t: t.replace(" ", "\u00a0", 1))),
    Pair("line ends of a reply", EDITED, "line_endings", "messages[4] assistant",
         said(3, lambda t: t.replace("\n", "\r\n"))),
    Pair("result cut", EDITED, "text", "messages[3] tool", said(2, lambda t: t[:200] + "\n[...]")),
    Pair("asked something else", EDITED, "text", "messages[5] user", said(4, lambda t: "Stop.")),
    Pair("taken back", None, None, "", dropped(3, 7)),
]  # fmt: skip


def explained(one: Body, other: Body) -> tuple[str, str, str] | None:
    lost = command.explain_pair(one, other, RAW)["lost"]
    return lost and (lost["reason"], lost["cause"], lost["where"])


def expected(pair: Pair) -> tuple[str | None, str | None, str] | None:
    return (pair.reason, pair.cause, pair.where) if pair.reason else None


@pytest.mark.parametrize("pair", [*MORE, *PAIRS], ids=str)
def test_two_requests_differ_where_they_were_changed(pair: Pair):
    """Reason, cause and part of a change are the same in either API's format."""
    one = pair.base()
    other = following(one)
    pair.change(other)
    assert explained(one, other) == expected(pair)
    if pair.base is not openai:
        assert explained(as_openai(one), as_openai(other)) == expected(pair)
    found = command.explain_pair(one, other, RAW)
    if (lost := found["lost"]) is None:
        assert found["new_tokens"] < 100
        return
    for shown, excerpt in zip(pair.shows, (lost["before"], lost["after"]), strict=True):
        assert shown in excerpt
    assert lost["before"] != lost["after"]
    assert lost["advice"]
    assert lost["at_token"] == found["shared_tokens"]


@pytest.mark.parametrize("template", OTHERS, indirect=True)
def test_other_templates_are_explained_alike(template: str):
    """Except thinking before a user message, which their prompts do not contain."""
    trimmed = ("blank at a reply's end", "taken back")  # by some; thinking is then shown again
    for pair in (one for one in (*PAIRS, *MORE) if one.name not in trimmed):
        one = pair.base()
        other = following(one)
        pair.change(other)
        shown = pair.cause not in ("thinking_dropped", "template_args")
        assert explained(one, other) == (expected(pair) if shown else None), pair


def test_the_audit_finds_a_snapshot_of_git():
    found = command.audit_one(with_snapshot(), RAW)["data"]
    assert any(one["cause"] == "git_status" and "(clean)" in one["text"] for one in found)


def test_text_behind_newer_history_costs_itself_alone():
    """What the newer history has is new, and the advice says that nothing can be done."""
    one, other = reading(), reading()
    read_more(other)
    found = command.explain_pair(one, other, RAW)
    size = len(tokenizer().encode(INSTRUCTION["content"]))
    assert size - 16 < found["lost"]["lost_tokens"] <= size + 8
    assert "cannot be avoided" in found["lost"]["advice"]


def test_the_advice_names_all_that_was_moved():
    """A sub-agent whose instruction is behind newer history, from which a reminder was taken."""
    one, other = reading(), reading()
    one["messages"][0]["content"] = reminder_before("Fix the parser.")
    read_more(other)
    other["messages"][0]["content"] = "Fix the parser."
    said(4, reminder_before)(other)
    found = command.explain_pair(one, other, RAW)
    assert found["lost"]["cause"] == "reminder_moved"
    assert [more["cause"] for more in found["later"]] == ["history_inserted"]
    for cause in ("reminder_moved", "history_inserted"):
        assert advice_for(cause) in found["lost"]["advice"]


def test_a_title_request_and_the_first_prompt_are_two_conversations():
    """The same words under another system text lose nothing."""
    one = {
        "system": "You write a title of at most fifty characters. " + text(9, "title"),
        "messages": [{"role": "user", "content": text(40, "asked")}],
    }
    found = command.explain_pair(one, {**first(), "messages": one["messages"]}, RAW)
    lost = found["lost"]
    assert (lost["reason"], lost["cause"], lost["lost_tokens"]) == (
        "first_seen",
        "new_conversation",
        0,
    )
    assert found["shared_tokens"] < 32  # the template's own
    assert found["new_tokens"] == found["prompt_tokens"]["second"] - found["shared_tokens"]
    assert found["later"][0]["where"] == "system"
    assert not any(more["where"].startswith("messages") for more in found["later"])


@pytest.mark.parametrize("tools", [True, False])
def test_another_first_message_under_the_same_system_text_begins_a_conversation(tools):
    """Nothing that the earlier conversation computed behind the system text is of use to it."""
    one = {**first(), "messages": [{"role": "user", "content": text(40, "asked")}]}
    other = {**one, "messages": [{"role": "user", "content": text(40, "something else")}]}
    if not tools:
        one, other = ({k: v for k, v in body.items() if k != "tools"} for body in (one, other))
    found = command.explain_pair(one, other, RAW)
    assert found["lost"]["reason"] == "first_seen"
    assert found["lost"]["lost_tokens"] == 0
    assert found["later"] == []
    assert found["new_tokens"] == found["prompt_tokens"]["second"] - found["shared_tokens"]


def test_another_session_with_almost_the_same_head_loses_what_is_the_same():
    """As of a client in a terminal and with -p: other words at the start, and one tool less."""
    one, other = following(first()), first()
    for body in (one, other):
        body["messages"][0]["content"] = reminder_before("What does this project do?")
    asked = reminder_before("Which tests? " + text(80, "x"))
    other["messages"] = [{"role": "user", "content": asked}]
    other["system"][1] = {"type": "text", "text": "You are an agent of the SDK.\n"}
    other["tools"] = other["tools"][:-1]
    assert len(other["tools"]) >= 3
    found = command.explain_pair(one, other, RAW)
    lost = found["lost"]
    assert (lost["reason"], lost["cause"], lost["where"]) == ("system_changed", "text", "system")
    assert lost["lost_tokens"] > 0.4 * found["prompt_tokens"]["second"]
    assert "terminal" in lost["advice"]
    assert "explain" not in lost["advice"]
    assert "compaction" not in {more["cause"] for more in found["later"]}


def test_the_first_of_two_causes_in_the_prompt_is_reported():
    """Its token position is exact, whatever the order in which the causes are found."""
    alone: dict[str, Body] = {}
    changes = [p for p in [*PAIRS, *MORE] if p.reason and p.base is first]
    for pair in changes:
        other = following(first())
        pair.change(other)
        alone[pair.name] = command.explain_pair(first(), other, RAW)["lost"]
    combined = list(itertools.combinations(changes, 2))
    random.Random(5).shuffle(combined)
    tried = 0
    for pairs in combined:
        first_one, second = sorted(pairs, key=lambda pair: alone[pair.name]["at_token"])
        near, far = alone[first_one.name], alone[second.name]
        moved = {first_one.cause, second.cause} & {"message_dropped", "compaction"}
        if far["at_token"] - near["at_token"] < 8 or near["reason"] == far["reason"] == TOOLS:
            continue
        if moved:  # together they make another change
            continue
        other = following(first())
        second.change(other)
        try:
            first_one.change(other)
        except (AssertionError, KeyError, IndexError):
            continue  # of what the other took away
        lost = command.explain_pair(first(), other, RAW)["lost"]
        assert (lost["cause"], lost["at_token"]) == (near["cause"], near["at_token"]), pairs
        assert lost["where"].split("[")[0] == near["where"].split("[")[0]
        tried += 1
        if tried == 60:
            break
    assert tried == 60
