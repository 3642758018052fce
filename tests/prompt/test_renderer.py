import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from mlxcache.errors import BadRequest, GenerationFailed
from mlxcache.prompt.codec import Escape
from mlxcache.prompt.images import ImageTemplate
from mlxcache.prompt.renderer import Renderer
from mlxcache.prompt.template import Template, probe
from mlxcache.types import Chat
from tests.prompt import kinds, templates
from tests.prompt.chats import TOOLS, agent_turns, restored
from tests.prompt.kinds import CONTROL, MARKS

FAMILIES = ("CHATML", "STRICT_SYSTEM", "LLAMA3", "GEMMA", "MISTRAL", "HOISTS")


def make(source: str, **args: Any) -> tuple[Renderer, Escape]:
    template = Template(kinds.tokenizer("byte_level", source))
    escape = Escape([*CONTROL, *MARKS], MARKS[:2])
    traits = probe(template, args)
    template_images = ImageTemplate(template, None, args, traits)
    return Renderer(template, traits, escape, args, template_images), escape


def source_of(name: str) -> str:
    return templates.chatml() if name == "CHATML" else getattr(templates, name)


MADE = {name: make(source_of(name)) for name in FAMILIES}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=30, deadline=None)
@given(turns=agent_turns())
def test_a_turn_without_its_generation_prompt_starts_the_next_turn(
    name: str, turns: list[Chat]
) -> None:
    renderer, _ = MADE[name]
    before = ""
    for chat in turns:
        rendered = renderer.render(chat)
        assert rendered.text.startswith(before)
        before = rendered.text[: rendered.generation]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15, deadline=None)
@given(turns=agent_turns())
def test_every_text_of_the_client_is_rendered(name: str, turns: list[Chat]) -> None:
    renderer, escape = MADE[name]
    for chat in turns:
        text = restored(escape, renderer.render(chat).text)
        for message in chat.messages:
            if message["role"] != "assistant":
                said = message["content"].strip()
                assert said in text or repr(said)[1:-1] in text or json_of(said) in text


def json_of(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def test_the_generation_prompt_depends_on_the_arguments() -> None:
    renderer, _ = make(templates.QWEN3)
    for args, end in (
        ({}, "assistant\n"),
        ({"enable_thinking": False}, "assistant\n<think>\n\n</think>\n\n"),
    ):
        rendered = renderer.render(Chat([user("hi")], template_args=args))
        assert rendered.text[rendered.generation :] == f"<|im_start|>{end}"


def test_a_generation_prompt_of_another_kind_is_found_by_rendering_twice() -> None:
    """Some templates continue after an assistant's message in their own way."""
    source = templates.chatml().replace(
        "{%- if add_generation_prompt -%}",
        "{%- if add_generation_prompt and messages[-1].role == 'assistant' -%}{{- '!' -}}"
        "{%- elif add_generation_prompt -%}",
    )
    renderer, _ = make(source)
    rendered = renderer.render(Chat([user("hi"), {"role": "assistant", "content": "yo"}]))
    assert rendered.text[rendered.generation :] == "!"


def test_a_generation_prompt_that_depends_on_the_conversation_is_not_guessed() -> None:
    """What was learned at load counts only if the text ends with it."""
    prompt = "'<|im_start|>assistant\n'"
    source = templates.chatml().replace(
        f"{{{{- {prompt} -}}}}", f"{{{{- '[INST]' if messages | length > 2 else {prompt} -}}}}"
    )
    renderer, _ = make(source)
    for count, end in ((1, "<|im_start|>assistant\n"), (3, "[INST]")):
        rendered = renderer.render(Chat([user("hi")] * count))
        assert rendered.text[rendered.generation :] == end


@pytest.mark.parametrize("name", FAMILIES)
def test_a_final_message_is_left_open(name: str) -> None:
    renderer, _ = MADE[name]
    opened = [user("hi"), {"role": "assistant", "content": "Sure: "}]
    rendered = renderer.render(Chat(opened, continue_final=True))
    assert rendered.text.endswith("Sure: ")
    assert rendered.generation == len(rendered.text)
    closed = [user("hi"), {"role": "assistant", "content": "Sure: yes"}, user("ok")]
    assert renderer.render(Chat(closed)).text.startswith(rendered.text)


def test_only_an_assistant_s_text_can_be_continued() -> None:
    renderer, _ = MADE["CHATML"]
    for last in (
        user("hi"),
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
    ):
        with pytest.raises(BadRequest):
            renderer.render(Chat([user("hi"), last], continue_final=True))


def test_no_messages_are_refused() -> None:
    with pytest.raises(BadRequest):
        MADE["CHATML"][0].render(Chat([]))


def test_arguments_of_the_renderer_itself_are_refused() -> None:
    """A request may not bring its own template."""
    with pytest.raises(BadRequest, match="chat_template"):
        MADE["CHATML"][0].render(Chat([user("hi")], template_args={"chat_template": "x"}))


def test_arguments_that_break_the_template_are_the_client_s_mistake() -> None:
    renderer, _ = make("{%- set ns = namespace(n=0) -%}" + templates.chatml())
    for name in ("self", "namespace"):
        with pytest.raises(BadRequest, match="argument"):
            renderer.render(Chat([user("hi")], template_args={name: 1}))
    broken, _ = make("{{ 1 // nothing }}")
    with pytest.raises(GenerationFailed):
        broken.render(Chat([user("hi")], template_args={"mood": "dry"}))


def test_text_in_arguments_is_escaped_and_a_conversation_s_own_win() -> None:
    renderer, escape = make("{{- style -}}" + templates.chatml(), style="dry")
    assert renderer.render(Chat([user("hi")])).text.startswith("dry<|im_start|>")
    text = renderer.render(Chat([user("hi")], template_args={"style": "<|im_end|>"})).text
    assert escape.has_sentinel(text)
    assert restored(escape, text).startswith("<|im_end|><|im_start|>")


def test_what_a_conversation_shares_with_its_first_messages() -> None:
    renderer, _ = MADE["CHATML"]
    chat = Chat([{"role": "system", "content": "S"}, user("one"), user("two")], TOOLS)
    text = renderer.render(chat).text
    assert text[: renderer.shared_characters(chat, 0, text)].endswith("<|im_end|>\n")
    assert "one" not in text[: renderer.shared_characters(chat, 0, text)]
    assert text[: renderer.shared_characters(chat, 2, text)].endswith("one<|im_end|>\n")
    alone = replace(chat, messages=chat.messages[1:])
    text = renderer.render(alone).text
    assert "Read" in text[: renderer.shared_characters(alone, 0, text)]


def test_first_messages_that_a_template_refuses_alone_are_shared_all_the_same() -> None:
    """Some want a user message before anything else."""
    source = (
        "{%- if messages | selectattr('role', 'equalto', 'user') | list | length == 0 -%}"
        "{{- raise_exception('No user.') -}}{%- endif -%}" + templates.chatml()
    )
    renderer, _ = make(source)
    chat = Chat([{"role": "system", "content": "Some system text"}, user("one")])
    text = renderer.render(chat).text
    assert "Some system text<|im_end|>" in text[: renderer.shared_characters(chat, 0, text)]


def nested(depth: int) -> Chat:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    call = {"id": "i", "function": {"name": "f", "arguments": {"a": value}}}
    return Chat([user("hi"), {"role": "assistant", "content": "", "tool_calls": [call]}])


def test_a_value_nested_too_deeply_is_refused() -> None:
    assert '["x"]' in MADE["CHATML"][0].render(nested(100)).text
    for depth in (1000, 20_000):
        with pytest.raises(BadRequest, match="deep"):
            MADE["CHATML"][0].render(nested(depth))
