"""Rules that use earlier requests: order of tools, arguments of calls, cleared results."""

import tracemalloc

import pytest

from mlxcache.prompt.canonical.canonicaliser import Canonicaliser
from mlxcache.prompt.canonical.remembered import CLEARED
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


def test_other_tools_have_an_order_of_their_own():
    rules = Canonicaliser()
    assert order(rules.canonicalise(Chat((USER,), [tool("b"), tool("a")]))) == ["b", "a"]
    for tools in ([tool("a"), tool("b"), tool("c")], [tool("a"), tool("b", "new")], [tool("a")]):
        assert rules.canonicalise(Chat((USER,), tools)).rules == ()


def test_a_tool_that_is_sent_twice_stays_twice():
    rules = Canonicaliser()
    rules.canonicalise(Chat((USER,), [tool("b"), tool("a"), tool("b")]))
    made = rules.canonicalise(Chat((USER,), [tool("a"), tool("b"), tool("b")]))
    assert order(made) == ["b", "a", "b"]


@pytest.mark.parametrize(("id", "tools"), [("i" * 100_000, 0), ("", 1500)])
def test_what_is_remembered_of_odd_requests_takes_little_memory(id, tools):
    rules = Canonicaliser()
    tracemalloc.start()
    for i in range(100):
        listed = [tool(f"t{i} {n}") for n in range(tools)]
        rules.canonicalise(Chat((USER, call({}, id=f"{id}{i}"), result("r", f"{id}{i}")), listed))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 6_000_000


def test_a_call_that_says_something_else_is_the_client_s():
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
    rules = Canonicaliser()
    rules.remember_call(ToolCall(0, "c1", "Read", "{"))
    rules.remember_call(ToolCall(0, "c1", "Read", "[1]"))
    assert rules.canonicalise(Chat((USER, call("as text"), result("r")))).rules == ()


def test_several_cleared_results_all_come_back():
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
    rules = Canonicaliser()
    rules.canonicalise(Chat((USER, call({"path": "a"}), result(LONG))))
    assert rules.canonicalise(Chat(messages)).rules == ()
