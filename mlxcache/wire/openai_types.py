"""Types of OpenAI's completion bodies, with the fields that can change an answer.

Sources: https://platform.openai.com/docs/api-reference/chat/create and
https://platform.openai.com/docs/api-reference/completions/create. `top_k`, `min_p`,
`repetition_penalty`, `repetition_context_size`, `xtc_probability`, `xtc_threshold`,
`chat_template_kwargs` and `reasoning_content` are extensions of local servers. `structured_outputs`
and the older `guided_...`, `min_tokens`, `stop_token_ids`, `allowed_token_ids` and
`include_stop_str_in_output` are vLLM's (https://docs.vllm.ai/en/latest/api/vllm/sampling_params/),
as is `priority`, `nvext` is NVIDIA Dynamo's (https://docs.nvidia.com/dynamo/),
`regex`, `ebnf`, `min_new_tokens` and `no_stop_trim` SGLang's
(https://docs.sglang.ai/basic_usage/sampling_params.html), top-level `json_schema` and `grammar`,
`n_predict`, `repeat_penalty` and `repeat_last_n` llama.cpp's
(https://github.com/ggml-org/llama.cpp/tree/master/tools/server). All other fields are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct


def checked(**schema: Any) -> Meta:
    """Return the JSON schema of what the conversion of a field checks, for the OpenAPI document."""
    return Meta(extra_json_schema=schema)


Unit = Annotated[float, Meta(ge=0, le=1)]
Repetition = Annotated[float, Meta(gt=0, le=100), checked(minimum=0.01)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Limit = Annotated[int, checked(minimum=-1, **{"not": {"const": 0}})]
"""Maximum tokens of a reply; -1 for no limit."""
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Name = Annotated[str, Meta(min_length=1)]
Stop = Annotated[str, checked(minLength=1)]
Strings = Annotated[list[str], checked(minItems=1)]
Falsy = Annotated[Any, checked(enum=[None, False, 0, "", [], {}])]
"""A field that is not supported, with the values that have no effect."""
Switch = bool | Literal["true", "false"]
"""A boolean, which some clients send as text."""


def is_on(switch: Switch | None) -> bool:
    return switch in (True, "true")


class Part(Struct):
    """One part of a message's content: text, or an image if the model accepts images."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    image: Any = None


class CalledFunction(Struct):
    """A tool call in the history. `arguments` is JSON text, or an object from some clients."""

    name: Name
    arguments: str | dict[str, Any] | None = None


class Call(Struct):
    function: CalledFunction
    id: str | None = None


class Message(Struct):
    """One message of a conversation.

    The role `function` is the older name of `tool`; `function_call` is the older form of
    `tool_calls`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None


class Function(Struct):
    """A function that may be called. With `strict`, arguments are valid against `parameters`."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Switch | None = None


class Tool(Struct):
    type: str
    function: Function | None = None


FunctionTool = Annotated[
    Tool,
    checked(
        properties={"type": {"const": "function"}, "function": {"type": "object"}},
        required=["function"],
    ),
]


class StreamOptions(Struct):
    include_usage: bool | None = None


class NamedFunction(Struct):
    name: Name


Choice = Annotated[str, checked(enum=["auto", "none", "required", "any"])]


class AllowedTool(Struct):
    """A reference to a tool by name. Chat Completions nests the name; Responses does not."""

    type: str
    function: NamedFunction | None = None
    name: str | None = None


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class ToolChoice(Struct):
    """The object form of `tool_choice`: one named tool, or several in `allowed_tools`."""

    type: Annotated[
        str, checked(enum=["auto", "none", "required", "any", "function", "allowed_tools"])
    ]
    function: NamedFunction | None = None
    name: str | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchema(Struct):
    """A named schema. The reply follows the schema even if `strict` is false."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: Switch | None = None


class Format(Struct):
    """The format of a reply. `schema` beside `json_object` is an extension of local servers."""

    type: Annotated[str, checked(enum=["text", "json_object", "json_schema"])]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None


def given(name: str) -> dict[str, Any]:
    """Return the schema of an object in which the field `name` is neither missing nor null."""
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


class StructuredOutputs(Struct):
    """The format of a reply in vLLM's form.

    Exactly one of `json`, `regex`, `choice`, `grammar` and `json_object` must be set. The other
    fields are not supported.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Falsy = None
    whitespace_pattern: Falsy = None
    disable_any_whitespace: Falsy = None
    disable_additional_properties: Falsy = None


class Thinking(Struct):
    """The switch for reasoning, as GLM and DeepSeek clients send it, and a budget in tokens."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Reasoning(Struct):
    """The effort of reasoning, or its maximum tokens.

    Source: https://openrouter.ai/docs/use-cases/reasoning-tokens.
    """

    effort: Effort | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None


class UnsupportedFields(Struct, kw_only=True):
    """Fields that would change the answer but are not supported. Using one is an error.

    Only `echo` is supported in one type of request, `TextRequest`.
    """

    adapters: Any = None
    add_special_tokens: Any = None
    audio: Any = None
    bad_words: Any = None
    chat_template: Any = None
    custom_logit_processor: Any = None
    documents: Any = None
    dry_multiplier: Any = None
    dynatemp_range: Any = None
    echo: Any = None
    format: Any = None
    function_call: Any = None
    functions: Any = None
    guided_whitespace_pattern: Any = None
    ignore_eos: Any = None
    include_reasoning: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    lora: Any = None
    lora_path: Any = None
    mirostat: Any = None
    n_probs: Any = None
    options: Any = None
    prompt_embeds: Any = None
    prompt_logprobs: Any = None
    reasoning_format: Any = None
    return_hidden_states: Any = None
    return_token_ids: Any = None
    return_tokens_as_token_ids: Any = None
    role_mapping: Any = None
    separate_reasoning: Any = None
    skip_special_tokens: Any = None
    stop_regex: Any = None
    structural_tag: Any = None
    suffix: Any = None
    tfs_z: Any = None
    think: Any = None
    top_n_sigma: Any = None
    truncate_prompt_tokens: Any = None
    typical_p: Any = None
    use_beam_search: Any = None
    web_search_options: Any = None


_HARMLESS: tuple[Any, ...] = (None, False, 0, "", "none", "auto", [], {})
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (None, True),
    "include_reasoning": (None, True),
    "length_penalty": (None, 1),
    "reasoning_format": (None, "auto", "deepseek"),
    "separate_reasoning": (None, True),
    "skip_special_tokens": (None, True),
    "tfs_z": (None, 1),
    "think": (None,),
    "top_n_sigma": (None, 0, -1),
    "typical_p": (None, 1),
}


def harmless(name: str) -> tuple[Any, ...]:
    """Return the values with which a field of `UnsupportedFields` has no effect."""
    return _NEUTRAL.get(name, _HARMLESS)


def is_harmless(name: str, value: Any) -> bool:
    found = [one for one in harmless(name) if one == value]
    return any(isinstance(one, bool) == isinstance(value, bool) for one in found)


class AgentHints(Struct):
    """Hints of NVIDIA Dynamo's clients; a higher `priority` is earlier. Others have no effect."""

    priority: int | None = None


class Extensions(Struct):
    agent_hints: AgentHints | None = None


class Generation(UnsupportedFields, kw_only=True):
    """Fields of requests to all OpenAI endpoints: sampling, limits, formats and streaming."""

    model: str | None = None
    max_tokens: Limit | None = None
    n_predict: Limit | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], checked(maxItems=16)] | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Unit | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Unit | None = None
    repetition_penalty: Repetition | None = None
    repeat_penalty: Repetition | None = None
    repetition_context_size: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    xtc_probability: Unit | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=0.5)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    allowed_token_ids: list[TokenId] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Meta(ge=-100, le=100)]],
            checked(propertyNames={"pattern": "^[0-9]{1,10}$"}),
        ]
        | None
    ) = None
    seed: int | None = None
    n: Annotated[int, checked(minimum=1, maximum=16)] | None = None
    best_of: int | None = None
    prompt_cache_key: str | None = None
    speculate: bool | None = None
    priority: int | None = None
    nvext: Extensions | None = None
    prompt_cache_retention: Any = None
    response_format: Format | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None


Turn = Annotated[
    Message,
    checked(
        anyOf=[
            {"properties": {"role": {"enum": ["assistant", "tool", "function"]}}},
            given("content"),
        ]
    ),
]


class ChatRequest(Generation, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Turn], Meta(min_length=1)]
    max_completion_tokens: Limit | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Choice | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    thinking_budget: Annotated[int, Meta(ge=-1)] | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None
    enable_thinking: bool | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    modalities: list[Annotated[str, checked(const="text")]] | None = None


_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_FILLED = {"type": "string", "minLength": 1}
_PROMPTS = [
    _FILLED,
    _IDS,
    {"type": "array", "minItems": 1, "items": _FILLED},
    {"type": "array", "minItems": 1, "items": _IDS},
]


class TextRequest(Generation, kw_only=True):
    """The body of POST /v1/completions. `prompt` is a text, token ids, or a list of either."""

    prompt: Annotated[str | list[str | int | list[int]], checked(allOf=[{"anyOf": _PROMPTS}])]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
