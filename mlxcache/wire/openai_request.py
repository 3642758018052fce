"""Conversion of OpenAI's request bodies to `Chat`, `Prompt`, `Sampling` and limits.

An unsupported field that would change the answer raises Unsupported with the field's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.types import DEFAULTED, TEXTS, Chat, Prompt, Sampling, Tokens, token_ids
from mlxcache.wire.decode import decode
from mlxcache.wire.images import ImageReader, Item, join_items
from mlxcache.wire.openai_types import (
    ChatRequest,
    Generation,
    Message,
    Part,
    TextRequest,
    Tool,
    UnsupportedFields,
)
from mlxcache.wire.retention import hints_from_retention

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_IMAGE_PARTS = frozenset({"image_url", "input_image", "image"})
_WITH_IMAGES = frozenset({"user", "tool", "function"})
"""Roles of messages that may have images."""
_HARMLESS: tuple[Any, ...] = (None, False, 0, "", "none", "auto", [], {})
"""Values with which an unsupported field has no effect."""
_INSTEAD = {"functions": ": use `tools`", "function_call": ": use `tools` and `tool_choice`"}
_RESERVED_ARGS = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "chat_template", "tokenize"),
        *("add_generation_prompt", "continue_final_message", "return_dict", "return_tensors"),
        *("return_assistant_tokens_mask", "padding", "truncation", "max_length"),
        "tokenizer_kwargs",
    }
)
"""Arguments that the server itself passes to a chat template, or that change its result's type."""

EFFORT_BUDGETS = {"minimal": 512, "low": 1024, "medium": 8192, "high": 24_576}
"""Maximum tokens of thinking by effort; from `low` on as in Gemini's API for OpenAI's clients.

Source: https://ai.google.dev/gemini-api/docs/openai#thinking."""

_EFFORT = {"minimal": "low", "xhigh": "high", "max": "high"}
"""Effort that a chat template gets, for efforts that many templates do not know."""
_INT32 = 2**31 - 1

MAX_CHOICES, MAX_REPLIES = 16, 128
"""Maximum choices of one prompt, and of one request."""


def check_supported(body: Generation) -> None:
    """Raise Unsupported for the first unsupported field of a completion request.

    Only fields that would change the answer are checked: those of `UnsupportedFields`, then those
    of chat or text completions. Raises BadRequest if fields contradict each other, or
    `chat_template_kwargs` has an argument that the server itself passes.
    """
    check_generation(body)
    if isinstance(body, ChatRequest):
        _check_chat(body)
    elif isinstance(body, TextRequest) and body.echo and body.logprobs is not None:
        message = "`echo` with `logprobs` is not supported: a prompt's are not computed."
        raise Unsupported(message, param="echo")


def check_generation(body: Generation) -> None:
    """Raise Unsupported for the first field of `UnsupportedFields` that a request uses.

    No endpoint supports these, except `echo` in text completions. A value without effect, such as
    null, is accepted.
    """
    echoes = isinstance(body, TextRequest)
    for field in UnsupportedFields.__struct_fields__:
        value = None if echoes and field == "echo" else getattr(body, field)
        if value not in _HARMLESS:
            instead = _INSTEAD.get(field, "")
            raise Unsupported(f"`{field}` is not supported{instead}.", param=field)


def _check_chat(body: ChatRequest) -> None:
    for kind in body.modalities or ():
        if kind != "text":
            raise Unsupported(f"The modality {kind!r} is not supported.", param="modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs`: true.", param="top_logprobs")
    if body.continue_final_message:
        _check_continuation(body)
    check_template_args(body.chat_template_kwargs)


def check_template_args(args: Mapping[str, Any] | None) -> None:
    """Raise BadRequest if `chat_template_kwargs` has an argument that the server itself passes."""
    for key in args or ():
        if key in _RESERVED_ARGS:
            raise BadRequest(
                f"The template argument {key!r} is reserved for the server.",
                param=f"chat_template_kwargs.{key}",
            )


def _check_continuation(body: ChatRequest) -> None:
    last = body.messages[-1]
    if last.role != "assistant":
        message = "`continue_final_message` needs an assistant message at the end."
    elif last.tool_calls or last.function_call:
        message = "A message that ends in tool calls cannot be continued: send their results."
    elif body.add_generation_prompt:
        message = "`continue_final_message` and `add_generation_prompt` exclude each other."
    else:
        return
    raise BadRequest(message, param="continue_final_message")


def to_sampling(body: Generation) -> Sampling:
    """Convert the sampling fields. The default temperature is 1, as OpenAI documents.

    Omitted fields are listed in `Sampling.unset`, so that the model's own defaults apply to them. A
    `top_p` of 0 leaves only the likeliest token, so it means greedy sampling. A seed is taken
    modulo 2**63.
    """
    plain = Sampling()
    greedy = body.top_p == 0
    temperature = 1.0 if body.temperature is None else body.temperature
    stated = {name for name in DEFAULTED if getattr(body, name) is not None}
    return Sampling(
        temperature=0.0 if greedy else temperature,
        top_p=body.top_p or 1.0,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        repetition_context=body.repetition_context_size or plain.repetition_context,
        xtc_probability=body.xtc_probability or 0.0,
        xtc_threshold=plain.xtc_threshold if body.xtc_threshold is None else body.xtc_threshold,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}),
        seed=None if body.seed is None else body.seed % 2**63,
        unset=frozenset(DEFAULTED) - stated - {"temperature" if greedy else ""},
    )


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for key in bias:
        if not (key.isascii() and key.isdecimal()) or len(key) > 10 or int(key) > _INT32:
            raise BadRequest(f"{key!r} is not a token id.", param="logit_bias")
    return tuple((int(key), value) for key, value in bias.items())


def read_choices(body: Generation) -> int:
    """Return `n`, the number of choices of each prompt.

    Raises BadRequest unless it is from 1 to 16, and Unsupported for a `best_of` other than `n`,
    because choices are not ranked.
    """
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_CHOICES:
        raise BadRequest(f"`n` must be from 1 to {MAX_CHOICES}.", param="n")
    if body.best_of not in (None, n):
        raise Unsupported("`best_of` must equal `n`: choices are not ranked.", param="best_of")
    return n


def wants_logprobs(body: Generation) -> bool:
    """Return whether the request asks for the log-probabilities of the reply's tokens."""
    if isinstance(body, ChatRequest):
        return bool(body.logprobs)
    return isinstance(body, TextRequest) and body.logprobs is not None


def of_choice(sampling: Sampling, index: int) -> Sampling:
    """Return the sampling of choice number `index` of a prompt, from 0.

    Its seed is that of `sampling` plus `index`; without a seed, it is `sampling` itself.
    """
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + index) % 2**63)


def read_stop_strings(body: Generation) -> tuple[str, ...]:
    """Return the stop strings. Raises BadRequest if one is empty or there are more than 16."""
    given = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(given) > 16:
        raise BadRequest("`stop` takes at most 16 strings.", param="stop")
    if "" in given:
        raise BadRequest("An empty `stop` string would end every reply.", param="stop")
    return tuple(given)


def read_max_tokens(body: Generation, default: int | None) -> int | None:
    """Return the maximum tokens of the reply, or None for no limit.

    `default` is returned if the request states no maximum. -1 in the request means no limit. Raises
    BadRequest for other values below 1 in the request.
    """
    limit = body.max_tokens
    param = "max_tokens"
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        limit, param = body.max_completion_tokens, "max_completion_tokens"
    return default if limit is None else limit_tokens(limit, param)


def limit_tokens(limit: int, param: str) -> int | None:
    """Return a limit of the reply in tokens; None for -1 (no limit).

    A limit above 2**31 - 1 is lowered to this number. Raises BadRequest with the field
    `param` for other values below 1.
    """
    if limit == -1:
        return None
    if limit < 1:
        raise BadRequest(f"`{param}` must be at least 1, or -1 for no limit.", param=param)
    return min(limit, _INT32)


def to_chat(body: ChatRequest, *, images: bool = False) -> Chat:
    """Convert `body` to a chat. `images` tells whether the model accepts images.

    The reply continues the final message if `continue_final_message` is true. If that is not set,
    and `add_generation_prompt` is not true, a final assistant message without tool calls is
    continued if it has text, and removed if it has neither text nor reasoning, unless it is the
    only message.

    Raises Unsupported for media other than images, for images if the model accepts none, for tools
    other than functions, and for `add_generation_prompt` false if no message is continued;
    BadRequest for a malformed message or tool.
    """
    reader = ImageReader(images)
    messages = [_message(m, i, reader) for i, m in enumerate(body.messages)]
    continues = bool(body.continue_final_message)
    undecided = body.continue_final_message is None and not body.add_generation_prompt
    if undecided and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
        continues = bool(messages[-1]["content"])
        if len(messages) > 1 and not continues and "reasoning_content" not in messages[-1]:
            messages.pop()
    if body.add_generation_prompt is False and not continues:
        message = "`add_generation_prompt`: false is supported only where a message is continued."
        raise Unsupported(message, param="add_generation_prompt")
    return Chat(
        messages=messages,
        tools=tuple(_tool(t, i) for i, t in enumerate(body.tools or ())),
        template_args=_template_args(body),
        continue_final=continues,
        keeps=hints_from_retention(body.prompt_cache_retention, len(messages)),
    )


def read_thinking_budget(body: ChatRequest, *, takes_effort: bool) -> int | None:
    """Return the maximum tokens of thinking, or None for no limit.

    It is the number that the request states; -1 means no limit. If it states none, the effort of
    reasoning becomes a number by `EFFORT_BUDGETS`, unless `takes_effort`: the chat template uses
    the effort itself.
    """
    stated = (
        body.thinking_budget,
        body.thinking_token_budget,
        body.thinking.budget_tokens if body.thinking else None,
        body.reasoning.max_tokens if body.reasoning else None,
    )
    budget = next((one for one in stated if one is not None), None)
    if budget is None and not takes_effort:
        budget = EFFORT_BUDGETS.get(_effort(body) or "")
    return None if budget == -1 else budget


def _effort(body: ChatRequest) -> str | None:
    return body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)


def _template_args(body: ChatRequest) -> dict[str, Any]:
    args = effort_args(_effort(body))
    if body.thinking and body.thinking.type in ("enabled", "disabled"):
        args["enable_thinking"] = body.thinking.type == "enabled"
    if body.enable_thinking is not None:
        args["enable_thinking"] = body.enable_thinking
    return args | (body.chat_template_kwargs or {})


def effort_args(effort: str | None) -> dict[str, Any]:
    """Return the arguments of the chat template for an effort of reasoning; empty for None.

    They are `enable_thinking` false for the effort `none`, else `reasoning_effort` with `low`,
    `medium` or `high`.
    """
    if effort == "none":
        return {"enable_thinking": False}
    return {"reasoning_effort": _EFFORT.get(effort, effort)} if effort else {}


def _tool(tool: Tool, index: int) -> dict[str, Any]:
    if tool.type != "function":
        where = f"tools[{index}].type"
        raise Unsupported(f"Tools of type {tool.type!r} are not supported.", param=where)
    if tool.function is None:
        raise BadRequest("A function tool needs `function`.", param=f"tools[{index}].function")
    empty = {"type": "object", "properties": {}}
    function = {
        "name": tool.function.name,
        "description": tool.function.description or "",
        "parameters": empty if tool.function.parameters is None else tool.function.parameters,
    }
    return {"type": "function", "function": function}


def _message(message: Message, index: int, images: ImageReader) -> dict[str, Any]:
    role = "tool" if message.role == "function" else message.role
    out: dict[str, Any] = {"role": role, "content": _content(message, index, images)}
    if message.name:
        out["name"] = message.name
    if role == "tool" and message.tool_call_id:
        out["tool_call_id"] = message.tool_call_id
    if role == "assistant":
        if len(texts := _texts(message)) > 1:
            out[TEXTS] = texts
        reasoning = message.reasoning_content or message.reasoning
        if reasoning and isinstance(reasoning, str):
            out["reasoning_content"] = reasoning
        if calls := _calls(message, index):
            out["tool_calls"] = calls
    return out


def _content(message: Message, index: int, images: ImageReader) -> str | list[Item]:
    if isinstance(message.content, list):
        where = f"messages[{index}].content"
        allowed = images.supported and message.role in _WITH_IMAGES
        items: list[Item] = []
        for i, part in enumerate(message.content):
            at = f"{where}[{i}]"
            if allowed and part.type in _IMAGE_PARTS:
                items.append(images.read_url(part.image_url or part.image, at))
            else:
                items.append(_text(part, at))
        return join_items(items, "\n\n" if message.role in ("system", "developer") else "")
    return message.content or message.refusal or ""


def _texts(message: Message) -> tuple[str, ...]:
    """Return the text parts of a message that are not empty; none if its content is a string."""
    parts = message.content if isinstance(message.content, list) else []
    return tuple(text for part in parts if (text := part.text or part.refusal))


def _text(part: Part, where: str) -> str:
    if part.type in _TEXT_PARTS and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type in _TEXT_PARTS or part.type == "refusal":
        raise BadRequest(f"A part of type {part.type!r} needs its text.", param=where)
    raise Unsupported(f"Content of type {part.type!r} is not supported.", param=f"{where}.type")


def _calls(message: Message, index: int) -> list[dict[str, Any]]:
    calls = [(c.id, c.function) for c in message.tool_calls or ()]
    if message.function_call and not calls:
        calls = [(None, message.function_call)]
    return [
        {
            "id": id or f"call_{index}_{i}",
            "type": "function",
            "function": {"name": function.name, "arguments": parse_arguments(function.arguments)},
        }
        for i, (id, function) in enumerate(calls)
    ]


def parse_arguments(text: str | dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a tool call as the object that chat templates expect.

    Missing arguments give {}. Text that is not a JSON object becomes the value of the key `_raw`.
    """
    if not isinstance(text, str):
        return text or {}
    if not text.strip():
        return {}
    try:
        return decode(dict[str, Any], text.encode())
    except BadRequest:
        return {"_raw": text}


def read_prompts(body: TextRequest) -> list[str | Prompt]:
    """Return the prompts to complete: texts, or `Prompt` objects made of the given token ids.

    Raises BadRequest for an empty list, an invalid token id, a mixture of texts and ids, and more
    than `MAX_REPLIES` choices in total.
    """
    given: str | Sequence[str | int | list[int]] = body.prompt
    if isinstance(given, str):
        return [given]
    ids = [i for i in given if isinstance(i, int)]
    if ids and len(ids) == len(given):
        return [Prompt(_ids(ids))]
    if len({type(one) for one in given}) != 1:
        message = "`prompt` must be a text, texts, token ids, or lists of token ids; not a mixture."
        raise BadRequest(message if given else "The prompt is empty.", param="prompt")
    asked = len(given) * read_choices(body)
    if asked > MAX_REPLIES:
        raise BadRequest(
            f"{len(given)} prompts, each with `n` choices, are {asked} choices: one request may "
            f"have {MAX_REPLIES}.",
            param="prompt",
        )
    return [one if isinstance(one, str) else Prompt(_ids(_as_ids(one))) for one in given]


def _as_ids(given: int | list[int]) -> list[int]:
    return [given] if isinstance(given, int) else given


def _ids(ids: Sequence[int]) -> Tokens:
    if not ids:
        raise BadRequest("The prompt is empty.", param="prompt")
    if min(ids) < 0 or max(ids) > _INT32:
        raise BadRequest("The prompt holds a number that is not a token id.", param="prompt")
    return token_ids(ids)
