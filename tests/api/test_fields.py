"""Every field of chat requests that OpenAI, vLLM, SGLang, llama.cpp, LM Studio or Ollama know.

Sources: https://platform.openai.com/docs/api-reference/chat/create,
https://docs.vllm.ai/en/latest/serving/openai_compatible_server/,
https://docs.sglang.ai/basic_usage/sampling_params.html,
https://github.com/ggml-org/llama.cpp/tree/master/tools/server,
https://lmstudio.ai/docs/developer/openai-compat and
https://docs.ollama.com/api/openai-compatibility.
"""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from mlxcache.wire.openai_types import UnsupportedFields
from tests.api.fake import FakeEngine

F = {"type": "function", "function": {"name": "f"}}
SERVED: dict[str, Any] = {
    **{"temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2},
    **{"presence_penalty": 1, "frequency_penalty": 1, "logit_bias": {"5": 1}},
    **{"max_tokens": 7, "max_completion_tokens": 7, "n_predict": 7, "stop": "x", "stream": True},
    **{"repetition_penalty": 1.1, "repeat_penalty": 1.1, "repeat_last_n": 9},
    **{"repetition_context_size": 9, "xtc_probability": 0.5, "xtc_threshold": 0.2},
    **{"min_tokens": 2, "min_new_tokens": 2, "stop_token_ids": [5], "allowed_token_ids": [5]},
    **{"include_stop_str_in_output": True, "no_stop_trim": True, "logprobs": True},
    **{"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    **{"guided_json": {}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "x"},
    **{"regex": "a", "ebnf": 'root ::= "a"', "grammar": 'root ::= "a"', "json_schema": {}},
    **{"tools": [F], "reasoning_effort": "low", "reasoning": {"effort": "low"}},
    **{"thinking": {"type": "disabled"}, "enable_thinking": False, "thinking_budget": 5},
    **{"thinking_token_budget": 5, "chat_template_kwargs": {"a": 1}, "speculate": False},
    **{"prompt_cache_key": "k", "prompt_cache_retention": "24h"},
    **{"priority": -1, "nvext": {"agent_hints": {"priority": 5}}},
}
REFUSED: dict[str, Any] = {
    **dict.fromkeys(UnsupportedFields.__struct_fields__, "x"),
    **{"modalities": ["audio"], "best_of": 2, "add_generation_prompt": False},
    **{"top_logprobs": 2, "tool_choice": "required", "continue_final_message": True},
    **{"skip_special_tokens": False, "think": False, "mirostat": 2, "options": {"seed": 1}},
}
NO_EFFECT: dict[str, Any] = {
    **{"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"},
    **{"safety_identifier": "u", "verbosity": "low", "prediction": {"type": "content"}},
    **{"parallel_tool_calls": False, "stream_options": {"include_usage": True}},
    **{"priority": 0, "request_id": "r", "rid": "r", "cache_salt": "s", "vllm_xargs": {}},
    **{"kv_transfer_params": {}, "mm_processor_kwargs": {}, "stream_reasoning": True},
    **{"ttl": 60, "draft_model": "d", "keep_alive": "5m", "cache_prompt": True, "id_slot": 1},
    **{"timings_per_token": True, "return_progress": True, "return_tokens": True},
    **{"samplers": ["top_k"], "min_keep": 1, "t_max_predict_ms": 0, "n_keep": 4, "n_discard": 0},
    **{"typical_p": 1.0, "mirostat": 0, "dry_multiplier": 0.0, "dynatemp_range": 0.0, "tfs_z": 1},
    **{"skip_special_tokens": True, "length_penalty": 1.0, "reasoning_format": "auto"},
    **{"ignore_eos": False, "echo": False, "suffix": "", "functions": [], "format": ""},
    **{"nvext": {"agent_hints": {"osl": 512, "latency_sensitivity": 1.2}}},
    **{"use_beam_search": False, "bad_words": [], "lora": [], "separate_reasoning": True},
}


async def outcome(client: httpx.AsyncClient, engine: FakeEngine, fields: dict[str, Any]) -> str:
    """What the engine and the client got for a request with `fields`."""
    engine.jobs.clear()
    engine.chats.clear()
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    found = f"{engine.jobs} {engine.chats} {response.text}"
    return re.sub(r"(req_|chatcmpl-)\w+|_s=[\d.e-]+|\"created\":\d+|0x\w+", "", found)


@pytest.mark.parametrize("name", SERVED)
async def test_it_is_served(client: httpx.AsyncClient, engine: FakeEngine, name: str) -> None:
    plain = await outcome(client, engine, {})
    assert await outcome(client, engine, {name: SERVED[name]}) != plain


@pytest.mark.parametrize("name", NO_EFFECT)
async def test_it_changes_nothing(client: httpx.AsyncClient, engine: FakeEngine, name: str) -> None:
    plain = await outcome(client, engine, {})
    assert await outcome(client, engine, {name: NO_EFFECT[name]}) == plain


@pytest.mark.parametrize("name", REFUSED)
async def test_it_is_refused_by_name(client: httpx.AsyncClient, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], name: REFUSED[name]}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
