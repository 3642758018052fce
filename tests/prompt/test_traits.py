from typing import Any

import pytest

from mlxcache.prompt.template import Template, Traits, probe
from tests.prompt import kinds, templates
from tests.prompt.kinds import Wrapped

EXPECTED = {
    "QWEN3": Traits(tools=True, tool_calls=True, tool_role=True),
    "STRICT_SYSTEM": Traits(system_anywhere=False, tools=True, tool_calls=True, tool_role=True),
    "HOISTS": Traits(system_anywhere=False, user_after_tool=False),
    "LLAMA3": Traits(
        tools=True, tool_calls=True, tool_role=True, calls_at_once=False, text_with_calls=False
    ),
    "GEMMA": Traits(system=False, system_anywhere=False, alternates=True, user_after_tool=False),
    "MISTRAL": Traits(
        system_anywhere=False,
        alternates=True,
        tools=True,
        tool_calls=True,
        tool_role=True,
        user_after_tool=False,
        text_with_calls=False,
        short_ids=True,
    ),
    "STRINGS": Traits(
        tools=True,
        tool_calls=True,
        tool_role=True,
        string_arguments=True,
        text_with_calls=False,
        absent_content=True,
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_traits_are_found_by_rendering(name: str) -> None:
    template = Template(kinds.tokenizer("byte_level", getattr(templates, name)))
    assert probe(template, {}) == EXPECTED[name]


def test_developer_is_taken_only_by_name() -> None:
    """A template that prints any role has not learned this one."""
    named = templates.QWEN3 + "{# developer #}"
    assert probe(Template(kinds.tokenizer("byte_level", named)), {}).developer
    assert not probe(Template(kinds.tokenizer("byte_level", templates.QWEN3)), {}).developer


def test_a_template_that_always_fails_takes_nothing_and_probing_survives() -> None:
    broken = "{{- raise_exception('no') -}}"
    traits = probe(Template(kinds.tokenizer("byte_level", broken)), {})
    taken = (traits.system, traits.tools, traits.tool_calls, traits.tool_role)
    assert not any(taken)


def test_templates_written_in_python_are_probed_alike() -> None:
    """Some models bring a function in place of Jinja, and it raises as functions do."""

    class Python(Wrapped):
        def apply_chat_template(self, messages: Any, /, **kwargs: Any) -> Any:
            assert all(m["role"] in ("system", "user", "assistant") for m in messages)
            return "".join(f"<s>{m['role']}:{m['content']}" for m in messages)

    inner = kinds.tokenizer("byte_level", templates.GEMMA)._tokenizer
    traits = probe(Template(Python(inner)), {})
    assert traits.system_anywhere
    assert not traits.tool_role


def test_without_a_template_everything_is_text() -> None:
    assert probe(Template(kinds.tokenizer("byte_level", None)), {}) == Traits()


def test_a_template_that_wants_the_last_reply_s_reasoning_is_probed_without_one() -> None:
    """Some refuse a conversation that ends with a reply whose thinking is missing."""
    wants = (
        "{%- if messages[-1].role == 'assistant' and not messages[-1].tool_calls -%}"
        "{{- raise_exception('no reasoning') -}}{%- endif -%}"
    )
    template = Template(kinds.tokenizer("byte_level", wants + templates.QWEN3))
    assert probe(template, {}) == EXPECTED["QWEN3"]
