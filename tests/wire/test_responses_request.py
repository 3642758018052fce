"""Bodies of the Responses API become chats."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest

from mlxcache.errors import BadRequest
from mlxcache.types import TEXTS, Chat
from mlxcache.wire import responses_request as wire
from mlxcache.wire.decode import decode
from mlxcache.wire.openai_request import read_max_tokens
from mlxcache.wire.responses_request import INPUT, Toolbox
from mlxcache.wire.responses_types import ResponsesRequest
from mlxcache.wire.signatures import sign_thinking

PIXEL = "data:image/png;base64,iVBORw0KGgo="


def body_of(**fields: Any) -> ResponsesRequest:
    return decode(ResponsesRequest, msgspec.json.encode(fields))


def chat_of(*items: Any, images: bool = False, stored: int = 0, **fields: Any) -> Chat:
    body = body_of(**({"input": list(items)} if items else {}), **fields)
    talk = wire.Conversation(wire.read_input(body), stored)
    return wire.to_chat(body, talk, Toolbox(body.tools or ()), images=images)


def said(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def call(id: str, name: str = "read", arguments: str = '{"path": "a"}', **more: Any) -> Any:
    return {"type": "function_call", "call_id": id, "name": name, "arguments": arguments, **more}


def result(id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": output}


class TestInput:
    def test_a_text_is_a_message_of_the_users(self) -> None:
        chat = chat_of(input="Hello", instructions="Be brief.")
        assert chat.messages == [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
        ]

    def test_an_item_needs_no_type_to_be_a_message(self) -> None:
        assert chat_of({"role": "user", "content": "Hi"}).messages[0]["content"] == "Hi"

    def test_reasoning_text_and_calls_of_a_reply_are_one_message(self) -> None:
        thought = {"type": "reasoning", "summary": [], "content": [{"text": "Look."}]}
        chat = chat_of(
            said("user", "Read a and b."),
            thought,
            said("assistant", "I look."),
            call("1"),
            call("2", arguments=""),
            result(
                "2", [{"type": "input_text", "text": "be"}, {"type": "input_text", "text": "ta"}]
            ),
            result("1", "alpha"),
            said("assistant", "Done."),
        )
        _, reply, first, second, last = chat.messages
        assert reply["reasoning_content"] == "Look."
        assert reply["content"] == "I look."
        assert [one["function"]["arguments"] for one in reply["tool_calls"]] == [{"path": "a"}, {}]
        assert first == {"role": "tool", "tool_call_id": "1", "name": "read", "content": "alpha"}
        assert second["content"] == "beta"
        assert last == {"role": "assistant", "content": "Done."}

    def test_two_replies_in_a_row_stay_two(self) -> None:
        thought = {"type": "reasoning", "content": [{"text": "Hm."}]}
        chat = chat_of(said("assistant", "One."), said("assistant", "Two."), thought, call("1"))
        assert [m["content"] for m in chat.messages] == ["One.", "Two.", ""]
        assert chat.messages[2]["reasoning_content"] == "Hm."
        assert chat.messages[2]["tool_calls"][0]["id"] == "1"

    def test_reasoning_comes_back_from_its_signature(self) -> None:
        sealed = {"type": "reasoning", "summary": [], "encrypted_content": sign_thinking("Hm.")}
        foreign = {"type": "reasoning", "summary": [{"text": "x"}], "encrypted_content": "gAAA"}
        chat = chat_of(sealed, said("assistant", "Yes."), said("user", "?"), foreign)
        assert chat.messages[0]["reasoning_content"] == "Hm."
        assert len(chat.messages) == 2

    def test_a_custom_call_is_a_call_with_one_text(self) -> None:
        one = {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "*** x"}
        back = {"type": "custom_tool_call_output", "call_id": "1", "output": "ok"}
        chat = chat_of(one, back)
        function = chat.messages[0]["tool_calls"][0]["function"]
        assert function == {"name": "patch", "arguments": {INPUT: "*** x"}}
        assert chat.messages[1]["name"] == "patch"

    def test_several_parts_of_a_reply_are_kept_apart_for_templates_that_can(self) -> None:
        parts = [{"type": "output_text", "text": one} for one in ("a", "b")]
        chat = chat_of({"role": "assistant", "content": parts})
        assert chat.messages[0]["content"] == "ab"
        assert chat.messages[0][TEXTS] == ("a", "b")

    def test_images_of_results_are_in_the_results(self) -> None:
        picture = {"type": "input_image", "image_url": PIXEL}
        chat = chat_of(
            call("1"),
            call("2"),
            result("1", [picture]),
            result("2", "b"),
            said("user", "So?"),
            images=True,
        )
        roles = [m["role"] for m in chat.messages]
        assert roles == ["assistant", "tool", "tool", "user"]
        (shown,) = chat.messages[1]["content"]
        assert shown.where == "input[2].output.content[0]"

    def test_searches_that_another_server_made_are_left_out(self) -> None:
        assert (
            len(chat_of({"type": "web_search_call", "id": "ws"}, said("user", "x")).messages) == 1
        )


class TestTruncation:
    def test_the_oldest_turns_go_and_head_and_newest_turn_stay(self) -> None:
        turns = [one for i in range(20) for one in (said("user", f"u{i}"), said("assistant", "a"))]
        chat = chat_of(said("developer", "d"), *turns, instructions="Be brief.")
        shorter = wire.shorten(chat)
        firsts = [one.messages[2]["content"] for one in shorter]
        assert firsts == ["u8", "u16", "u19"]
        heads = [[m["role"] for m in one.messages[:2]] for one in shorter]
        assert heads == [["system", "developer"]] * 3
        assert all(one.messages[-1]["content"] == "a" for one in shorter)

    def test_a_single_turn_cannot_be_shortened(self) -> None:
        assert wire.shorten(chat_of(input="x")) == []


class TestOptions:
    def test_effort_is_an_argument_of_the_template(self) -> None:
        assert chat_of(input="x", reasoning={"effort": "low"}).template_args == {
            "reasoning_effort": "low"
        }
        assert chat_of(input="x", reasoning={"effort": "none"}).template_args == {
            "enable_thinking": False
        }

    def test_effort_is_a_budget_where_the_template_takes_none(self) -> None:
        body = body_of(input="x", reasoning={"effort": "low", "summary": "auto"})
        assert wire.read_thinking_budget(body, takes_effort=False) == 1024
        assert wire.read_thinking_budget(body, takes_effort=True) is None
        assert wire.read_thinking_budget(body_of(input="x"), takes_effort=False) is None

    def test_a_format_is_read(self) -> None:
        schema = {"type": "object", "properties": {}}
        form = {"type": "json_schema", "name": "x", "schema": schema}
        found = wire.read_text_format(body_of(input="x", text={"format": form}))
        assert found is not None
        assert found.kind == "json_schema"
        assert wire.read_text_format(body_of(input="x", text={"format": {"type": "text"}})) is None
        json_object = body_of(input="x", text={"format": {"type": "json_object"}})
        assert wire.read_text_format(json_object) is not None

    def test_limits(self) -> None:
        assert read_max_tokens(body_of(max_output_tokens=5), 9) == 5
        assert read_max_tokens(body_of(max_output_tokens=-1), 9) is None
        assert read_max_tokens(body_of(), 9) == 9


FUNCTION = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": True}
SPACE = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Patches.",
    "format": {"type": "grammar", "syntax": "regex", "definition": "a+"},
}


class TestTools:
    def use(self, tools: list[Any], **fields: Any) -> Any:
        body = body_of(input="x", tools=tools, **fields)
        return Toolbox(body.tools or ()).read_use(body)

    def test_tools_of_all_kinds_are_functions(self) -> None:
        chat = chat_of(input="x", tools=[FUNCTION, SPACE, PATCH, {"type": "web_search"}])
        read, spawn, patch = (tool["function"] for tool in chat.tools)
        assert [read["name"], spawn["name"], patch["name"]] == ["read", "spawn", "patch"]
        assert "strict" not in read
        assert patch["parameters"]["required"] == [INPUT]
        assert "a+" in patch["description"]

    def test_what_a_grammar_needs_is_no_part_of_the_prompt(self) -> None:
        read, patch = self.use([FUNCTION, PATCH]).tools
        assert read["function"]["strict"] is True
        assert patch["function"]["parameters"]["properties"][INPUT]["pattern"] == "^(?:a+)$"
        shown = chat_of(input="x", tools=[PATCH]).tools[0]["function"]["parameters"]
        assert shown["properties"][INPUT] == {"type": "string"}

    def test_a_tool_of_a_namespace_keeps_its_name_unless_it_is_taken(self) -> None:
        spawn = {"type": "function", "name": "spawn"}
        chat = chat_of(call("1", "spawn", namespace="agents"), tools=[spawn, SPACE])
        assert [tool["function"]["name"] for tool in chat.tools] == ["spawn", "agents__spawn"]
        assert chat.messages[0]["tool_calls"][0]["function"]["name"] == "agents__spawn"

    def test_the_name_of_many_tools_groups_is_short(self) -> None:
        with pytest.raises(BadRequest, match="at most 512 characters"):
            self.use([{**SPACE, "name": "n" * 513}])
        results = [{"type": "function_call_output", "call_id": "1", "output": "x"}] * 9
        messages = chat_of(call("1", "n" * 10_000), *results).messages
        assert len(str(messages)) < 20_000

    def test_the_last_of_many_tools_is_found_as_fast_as_the_first(self) -> None:
        """The event loop waits for it, once for each call in the history."""
        tools = [{"type": "function", "name": f"tool_{i}"} for i in range(2000)]
        box = Toolbox(body_of(input="x", tools=tools).tools or ())

        def seconds(name: str) -> float:
            began = time.process_time()
            for _ in range(2000):
                assert box.rendered_name(name, None) == box.find(name).name == name
            return time.process_time() - began

        assert seconds("tool_1999") < 20 * seconds("tool_0")

    @pytest.mark.parametrize(
        ("choice", "required", "names"),
        [
            ("auto", False, ()),
            ("required", True, ()),
            ({"type": "function", "name": "read"}, True, ("read",)),
            ({"type": "custom", "name": "patch"}, True, ("patch",)),
            (
                {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "read"}, {"type": "web_search"}],
                },
                False,
                ("read",),
            ),
        ],
    )
    def test_choices(self, choice: Any, required: bool, names: tuple[str, ...]) -> None:
        use = self.use([FUNCTION, PATCH], tool_choice=choice)
        assert use.choice.required == required
        assert use.choice.names == names

    def test_none_leaves_the_tools_in_the_prompt(self) -> None:
        assert self.use([FUNCTION], tool_choice="none").tools is None
