"""Rules that use earlier requests: order of tools, arguments of calls, cleared results."""

import json
import random

import pytest

from mlxcache.prompt.canonical.canonicaliser import Canonicaliser
from mlxcache.prompt.canonical.remembered import CLEARED, equal_values
from mlxcache.types import Chat, ToolCall

USER = {"role": "user", "content": "hi"}
LONG = "line of a file\n" * 40


def tool(name, description="d"):
    function = {"name": name, "description": description, "parameters": {"type": "object"}}
    return {"type": "function", "function": function}


def call(arguments, id="c1", name="Read"):
    given = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [given]}


def result(text, id="c1"):
    return {"role": "tool", "tool_call_id": id, "content": text}


def order(made):
    return [tool["function"]["name"] for tool in made.chat.tools]


def test_tools_in_changing_order_keep_the_first():
    """The client's first order is kept."""
    rules = Canonicaliser()
    tools = [tool(name) for name in "dacb"]
    first = rules.canonicalise(Chat((USER,), tools))
    assert (order(first), first.rules) == (list("dacb"), ())
    for seed in range(5):
        random.Random(seed).shuffle(tools)
        made = rules.canonicalise(Chat((USER,), tuple(tools)))
        assert order(made) == list("dacb")


def test_other_tools_have_an_order_of_their_own():
    """One more, one less, or another description: these are not the same tools."""
    rules = Canonicaliser()
    assert order(rules.canonicalise(Chat((USER,), [tool("b"), tool("a")]))) == ["b", "a"]
    for tools in ([tool("a"), tool("b"), tool("c")], [tool("a"), tool("b", "new")], [tool("a")]):
        assert rules.canonicalise(Chat((USER,), tools)).rules == ()


def test_a_tool_that_is_sent_twice_stays_twice():
    """Nothing is lost by the order."""
    rules = Canonicaliser()
    rules.canonicalise(Chat((USER,), [tool("b"), tool("a"), tool("b")]))
    made = rules.canonicalise(Chat((USER,), [tool("a"), tool("b"), tool("b")]))
    assert order(made) == ["b", "a", "b"]


def test_a_call_comes_back_as_the_model_wrote_it():
    """Whatever the client's JSON library did to it."""
    rules = Canonicaliser()
    written = '{"path": "a", "range": {"to": 2.0, "from": 1}, "all": true}'
    rules.remember_call(ToolCall(0, "c1", "Read", written))
    anew = {"all": True, "path": "a", "range": {"from": 1, "to": 2}}
    made = rules.canonicalise(Chat((USER, call(anew), result("r"))))
    shown = made.chat.messages[1]["tool_calls"][0]["function"]["arguments"]
    assert json.dumps(shown) == written
    assert made.rules == ("argument_order",)


def test_a_call_that_says_something_else_is_the_client_s():
    """Edited arguments, another tool, another id."""
    rules = Canonicaliser()
    rules.remember_call(ToolCall(0, "c1", "Read", '{"path": "a", "all": true}'))
    for changed in (call({"all": 1, "path": "a"}), call({"all": True, "path": "b"})):
        assert rules.canonicalise(Chat((USER, changed, result("r")))).rules == ()
    same = {"all": True, "path": "a"}
    for other in (call(same, id="c2"), call(same, name="Write")):
        assert rules.canonicalise(Chat((USER, other, result("r")))).rules == ()


def test_after_a_restart_the_first_form_that_came_is_kept():
    """Calls that this server did not write itself."""
    rules = Canonicaliser()
    assert rules.canonicalise(Chat((USER, call({"b": 1, "a": 2}), result("r")))).rules == ()
    made = rules.canonicalise(Chat((USER, call({"a": 2, "b": 1}), result("r"))))
    assert list(made.chat.messages[1]["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]


def test_a_call_that_is_no_json_is_let_be():
    """A model may write anything."""
    rules = Canonicaliser()
    rules.remember_call(ToolCall(0, "c1", "Read", "{"))
    rules.remember_call(ToolCall(0, "c1", "Read", "[1]"))
    assert rules.canonicalise(Chat((USER, call("as text"), result("r")))).rules == ()


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ({"a": 1, "b": [1, {"c": None}]}, {"b": [1.0, {"c": None}], "a": 1}, True),
        ([1, 2], [2, 1], False),
        (1, True, False),
        (0, False, False),
        ("1", 1, False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (None, {}, False),
    ],
)
def test_values_that_say_the_same(a, b, same):
    """As JSON has it, where true is no number."""
    assert equal_values(a, b) == same


def test_a_cleared_result_is_rendered_as_it_was():
    """In the same place of the same conversation."""
    rules = Canonicaliser()
    before = (USER, call({"path": "a"}), result(LONG))
    assert rules.canonicalise(Chat(before)).rules == ()
    after = (USER, call({"path": "a"}), result(CLEARED), {"role": "user", "content": "on"})
    made = rules.canonicalise(Chat(after))
    assert tuple(made.chat.messages) == (*before, after[-1])
    assert made.rules == ("cleared_results",)
    assert rules.canonicalise(Chat(after), without=("cleared_results",)).rules == ()


def test_several_cleared_results_all_come_back():
    """Each is found by what stands before it, the others as they were."""
    rules = Canonicaliser()
    texts = [f"{n} {LONG}" for n in range(3)]
    calls = [call({"path": "a"}, id=str(n)) for n in range(3)]

    def chat(results):
        turns = [m for n in range(3) for m in (calls[n], result(results[n], str(n)))]
        return Chat((USER, *turns))

    rules.canonicalise(chat(texts))
    made = rules.canonicalise(chat([CLEARED, CLEARED, texts[2]]))
    assert made.chat.messages == chat(texts).messages


@pytest.mark.parametrize(
    "messages",
    [
        (USER, call({"path": "b"}), result(CLEARED)),
        ({"role": "user", "content": "ho"}, call({"path": "a"}), result(CLEARED)),
        (USER, call({"path": "a"}, id="c2"), result(CLEARED, "c2")),
        (USER, call({"path": "a"}), result(f"{CLEARED} ")),
        (USER, call({"path": "a"}), result(f"It says {CLEARED}")),
        (USER, call({"path": "a"}), {"role": "user", "content": CLEARED}),
    ],
)
def test_what_was_cleared_elsewhere_stays_cleared(messages):
    """Another conversation, another call, other words; never a person's."""
    rules = Canonicaliser()
    rules.canonicalise(Chat((USER, call({"path": "a"}), result(LONG))))
    assert rules.canonicalise(Chat(messages)).rules == ()
