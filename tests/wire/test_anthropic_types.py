"""Every field of a request changes the chat, is refused by name, or leaves the prompt as it is."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcache.errors import Unsupported
from tests.wire.anthropic_bodies import read, rendered


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, {}),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "adaptive", "display": "omitted"}, {"enable_thinking": True}),
        ({"type": "adaptive", "display": "summarized"}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
    ],
)
def test_thinking_is_the_templates_to_switch(thinking: Any, expected: dict[str, Any]) -> None:
    assert read(thinking=thinking).template_args == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mcp_servers", [{"type": "url", "url": "https://example.org"}]),
        ("thread", {"type": "continue", "previous_message_id": "msg_1"}),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(Unsupported, match=field):
        read(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", {"type": "auto", "disable_parallel_tool_use": True}),
        ("tool_choice", {"type": "none"}),
        ("tool_choice", {"type": "any"}),
        ("output_format", {"type": "json_schema", "schema": {}}),
        ("output_config", {"format": {"type": "json_schema", "schema": {}}}),
        ("output_config", {"effort": "high"}),
        ("output_config", {"format": None}),
        ("mcp_servers", []),
        ("context_management", {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        ("safeguards", {"anything": 1}),
        ("metadata", {"user_id": "x"}),
        ("service_tier", "auto"),
        ("container", None),
        ("speed", "fast"),
        ("betas", ["x"]),
        ("a_field_of_tomorrow", [1]),
    ],
)
def test_what_changes_no_prompt_is_accepted(field: str, value: Any) -> None:
    assert rendered(read(**{field: value})) == rendered(read())
