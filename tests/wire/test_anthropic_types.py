"""What of a request leaves the prompt as it is."""

from __future__ import annotations

from typing import Any

import pytest

from tests.wire.anthropic_bodies import read, rendered


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (None, {}),
        ({"type": "enabled", "budget_tokens": 1024}, {"enable_thinking": True}),
        ({"type": "adaptive", "display": "omitted"}, {"enable_thinking": True}),
        ({"type": "adaptive", "display": "summarized"}, {"enable_thinking": True}),
        ({"type": "disabled"}, {"enable_thinking": False}),
        ({"type": "between_tools"}, {"enable_thinking": False}),
    ],
)
def test_thinking_is_the_templates_to_switch(thinking: Any, expected: dict[str, Any]) -> None:
    assert read(thinking=thinking).template_args == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tool_choice", {"type": "auto", "disable_parallel_tool_use": True}),
        ("tool_choice", {"type": "none"}),
        ("tool_choice", {"type": "any"}),
        ("output_format", {"type": "json_schema", "schema": {}}),
        ("output_config", {"format": {"type": "json_schema", "schema": {}}}),
        ("output_config", {"format": None}),
        ("stop_sequences", ["END"]),
        ("mcp_servers", []),
        ("context_management", {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        ("context_management", {}),
        ("billing_policy", {"type": "billing_policy"}),
        ("diagnostics", {"previous_message_id": "msg_1"}),
        ("fallbacks", [{"model": "another"}]),
        ("inference_geo", "eu"),
        ("user_profile_id", "up_1"),
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
