"""Conversion of OpenAI's request bodies to `Chat`, `Prompt`, `Sampling`, limits, formats and tools.

An unsupported field that would change the answer raises Unsupported with the field's name.
Sources: https://platform.openai.com/docs/guides/structured-outputs and
https://platform.openai.com/docs/guides/function-calling. Extensions are listed in `openai_types`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.types import (
    DEFAULTED,
    TEXTS,
    Chat,
    OutputFormat,
    Prompt,
    Sampling,
    Tokens,
    ToolChoice,
    token_ids,
)
from mlxcache.wire import openai_types as types
from mlxcache.wire.chat_parts import (
    EFFORT_BUDGETS,
    Function,
    ToolUse,
    check_template_args,
    effort_args,
    format_of_schema,
    in_call_order,
    keep_hints,
    make_call,
    make_function,
    parse_arguments,
    with_strict,
)
from mlxcache.wire.decode import decode, wrong
from mlxcache.wire.images import ImageReader, Item, join_items

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_IMAGE_PARTS = frozenset({"image_url", "input_image", "image"})
_WITH_IMAGES = frozenset({"user", "tool", "function"})
"""Roles of messages that may have images."""
_INSTEAD = {
    "format": ": use `response_format`",
    "functions": ": use `tools`",
    "function_call": ": use `tools` and `tool_choice`",
    "options": ": send its fields beside `messages`",
    "think": ": use `enable_thinking` or `reasoning_effort`",
}
_INT32 = 2**31 - 1

MAX_CHOICES, MAX_REPLIES = 16, 128
"""Maximum choices of one prompt, and of one request."""

_UNSUPPORTED_OPTIONS = (
    *("structural_tag", "whitespace_pattern"),
    *("disable_any_whitespace", "disable_additional_properties"),
)
_FORMATS = ("json", "regex", "choice", "grammar", "json_object")


def check_supported(body: types.Generation) -> None:
    """Raise Unsupported for the first unsupported field that would change the answer.

    Raises BadRequest if fields contradict each other.
    """
    check_generation(body)
    if isinstance(body, types.ChatRequest):
        _check_chat(body)


def check_generation(body: types.Generation) -> None:
    """Raise Unsupported for the first field of `UnsupportedFields` that a request uses."""
    echoes = isinstance(body, types.TextRequest)
    for name in types.UnsupportedFields.__struct_fields__:
        value = None if echoes and name == "echo" else getattr(body, name)
        if not types.is_harmless(name, value):
            instead = _INSTEAD.get(name, "")
            raise Unsupported(f"`{name}` is not supported{instead}.", param=name)


def _check_chat(body: types.ChatRequest) -> None:
    for kind in body.modalities or ():
        if kind != "text":
            raise Unsupported(f"The modality {kind!r} is not supported.", param="modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("`top_logprobs` needs `logprobs`: true.", param="top_logprobs")
    if body.continue_final_message:
        _check_continuation(body)
    check_template_args(body.chat_template_kwargs)


def _check_continuation(body: types.ChatRequest) -> None:
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


def to_sampling(body: types.Generation) -> Sampling:
    """Convert the sampling fields. The model's own defaults apply to omitted ones (`unset`).

    A `top_p` of 0 leaves only the likeliest token, so it means greedy sampling.
    """
    plain = Sampling()
    greedy = body.top_p == 0
    temperature = 1.0 if body.temperature is None else body.temperature
    stated = {name for name in DEFAULTED if getattr(body, name) is not None}
    penalty = body.repetition_penalty or body.repeat_penalty
    context = body.repetition_context_size or body.repeat_last_n
    if penalty is not None:
        stated.add("repetition_penalty")
    return Sampling(
        temperature=0.0 if greedy else temperature,
        top_p=body.top_p or 1.0,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        repetition_penalty=penalty or 1.0,
        repetition_context=context or plain.repetition_context,
        xtc_probability=body.xtc_probability or 0.0,
        xtc_threshold=plain.xtc_threshold if body.xtc_threshold is None else body.xtc_threshold,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}),
        allowed_tokens=tuple(body.allowed_token_ids or ()),
        stop_tokens=tuple(body.stop_token_ids or ()),
        min_tokens=body.min_tokens or body.min_new_tokens or 0,
        seed=None if body.seed is None else body.seed % 2**63,
        unset=frozenset(DEFAULTED) - stated - {"temperature" if greedy else ""},
    )


def _logit_bias(bias: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for key in bias:
        if not (key.isascii() and key.isdecimal()) or len(key) > 10 or int(key) > _INT32:
            raise BadRequest(f"{key!r} is not a token id.", param="logit_bias")
    return tuple((int(key), value) for key, value in bias.items())


def read_choices(body: types.Generation) -> int:
    """Return `n`, the number of choices of each prompt."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_CHOICES:
        raise BadRequest(f"`n` must be from 1 to {MAX_CHOICES}.", param="n")
    if body.best_of not in (None, n):
        raise Unsupported("`best_of` must equal `n`: choices are not ranked.", param="best_of")
    return n


def read_priority(body: types.Generation) -> int:
    """Return the priority of a request, higher is earlier; in vLLM's field lower is earlier."""
    hints = body.nvext.agent_hints if body.nvext else None
    asked = hints.priority if hints else None
    return -(body.priority or 0) if asked is None else asked


def wants_logprobs(body: types.Generation) -> bool:
    if isinstance(body, types.ChatRequest):
        return bool(body.logprobs)
    return isinstance(body, types.TextRequest) and body.logprobs is not None


def wants_prompt_logprobs(body: types.Generation) -> bool:
    return isinstance(body, types.TextRequest) and bool(body.echo) and wants_logprobs(body)


def of_choice(sampling: Sampling, index: int) -> Sampling:
    """Return the sampling of choice number `index` of a prompt: each has a seed of its own."""
    if sampling.seed is None:
        return sampling
    return replace(sampling, seed=(sampling.seed + index) % 2**63)


def read_stop_strings(body: types.Generation) -> tuple[str, ...]:
    given = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(given) > 16:
        raise BadRequest("`stop` takes at most 16 strings.", param="stop")
    if "" in given:
        raise BadRequest("An empty `stop` string would end every reply.", param="stop")
    return tuple(given)


def shows_stop(body: types.Generation) -> bool:
    return bool(body.include_stop_str_in_output or body.no_stop_trim)


def read_max_tokens(body: types.Generation, default: int | None) -> int | None:
    """Return the maximum tokens of the reply, by default `default`; None for no limit.

    It may be 0 only if the prompt's log-probabilities are requested.
    """
    for name in ("max_completion_tokens", "max_output_tokens", "max_tokens", "n_predict"):
        if (limit := getattr(body, name, None)) is not None:
            alone = limit == 0 and wants_prompt_logprobs(body)
            return 0 if alone else limit_tokens(limit, name)
    return default


def limit_tokens(limit: int, param: str) -> int | None:
    """Return a limit of the reply in tokens; None for -1 (no limit)."""
    if limit == -1:
        return None
    if limit < 1:
        raise BadRequest(f"`{param}` must be at least 1, or -1 for no limit.", param=param)
    return min(limit, _INT32)


def to_chat(body: types.ChatRequest, *, images: bool = False) -> Chat:
    """Convert `body` to a chat. `images` tells whether the model accepts images.

    The reply continues the final message if `continue_final_message` is true. If that is not set,
    and `add_generation_prompt` is not true, a final assistant message without tool calls is
    continued if it has text, and removed if it has neither text nor reasoning, unless it is the
    only message.
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
        messages=in_call_order(messages),
        tools=tuple(_tool(t, i) for i, t in enumerate(body.tools or ())),
        template_args=_template_args(body),
        continue_final=continues,
        keeps=keep_hints(body.prompt_cache_retention, len(messages)),
    )


def read_thinking_budget(body: types.ChatRequest, *, takes_effort: bool) -> int | None:
    """Return the maximum tokens of thinking, or None for no limit.

    It is 0 if thinking is off. Without a stated number, the effort becomes one, unless the chat
    template `takes_effort` itself.
    """
    if _template_args(body).get("enable_thinking") is False:
        return 0
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


def _effort(body: types.ChatRequest) -> str | None:
    return body.reasoning_effort or (body.reasoning.effort if body.reasoning else None)


def _template_args(body: types.ChatRequest) -> dict[str, Any]:
    args = effort_args(_effort(body))
    if body.thinking and body.thinking.type in ("enabled", "disabled"):
        args["enable_thinking"] = body.thinking.type == "enabled"
    if body.enable_thinking is not None:
        args["enable_thinking"] = body.enable_thinking
    return args | (body.chat_template_kwargs or {})


def _tool(tool: types.Tool, index: int) -> Function:
    if tool.type != "function":
        where = f"tools[{index}].type"
        raise Unsupported(f"Tools of type {tool.type!r} are not supported.", param=where)
    if tool.function is None:
        raise BadRequest("A function tool needs `function`.", param=f"tools[{index}].function")
    one = tool.function
    return make_function(one.name, one.description, one.parameters)


def _message(message: types.Message, index: int, images: ImageReader) -> dict[str, Any]:
    role = "tool" if message.role == "function" else message.role
    out: dict[str, Any] = {"role": role, "content": _content(message, index, images)}
    if message.name:
        out["name"] = message.name
    if role == "tool" and message.tool_call_id:
        out["tool_call_id"] = message.tool_call_id
    if role in ("assistant", "user") and isinstance(message.content, list):
        texts = tuple(text for part in message.content if (text := part.text or part.refusal))
        if len(texts) > 1:
            out[TEXTS] = texts
    if role == "assistant":
        reasoning = message.reasoning_content or message.reasoning
        if reasoning and isinstance(reasoning, str):
            out["reasoning_content"] = reasoning
        if calls := _calls(message, index):
            out["tool_calls"] = calls
    return out


def _content(message: types.Message, index: int, images: ImageReader) -> str | list[Item]:
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
    if message.content is None and message.role in ("system", "developer", "user"):
        raise wrong(f"messages[{index}].content", f"a {message.role} message needs content.")
    return message.content or message.refusal or ""


def _text(part: types.Part, where: str) -> str:
    if part.type in _TEXT_PARTS and part.text is not None:
        return part.text
    if part.type == "refusal" and part.refusal is not None:
        return part.refusal
    if part.type in _TEXT_PARTS or part.type == "refusal":
        raise BadRequest(f"A part of type {part.type!r} needs its text.", param=where)
    raise Unsupported(f"Content of type {part.type!r} is not supported.", param=f"{where}.type")


def _calls(message: types.Message, index: int) -> list[dict[str, Any]]:
    calls = [(c.id, c.function) for c in message.tool_calls or ()]
    if message.function_call and not calls:
        calls = [(None, message.function_call)]
    return [
        make_call(id or f"call_{index}_{i}", called.name, parse_arguments(called.arguments))
        for i, (id, called) in enumerate(calls)
    ]


def read_prompts(body: types.TextRequest) -> list[str | Prompt]:
    """Return the prompts to complete: texts, or `Prompt` objects made of the given token ids."""
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
    lists = ([one] if isinstance(one, int) else one for one in given)
    return [one if isinstance(one, str) else Prompt(_ids(one)) for one in lists]


def _ids(ids: Sequence[int]) -> Tokens:
    if not ids:
        raise BadRequest("The prompt is empty.", param="prompt")
    if min(ids) < 0 or max(ids) > _INT32:
        raise BadRequest("The prompt holds a number that is not a token id.", param="prompt")
    return token_ids(ids)


# -- format ----------------------------------------------------------------------------------


def read_format(body: types.Generation) -> OutputFormat | None:
    """Return the required format of the reply, or None for free text."""
    found = list(_formats(body))
    if len(found) > 1:
        one, other = found[0].param, found[1].param
        message = f"A reply has one format: use `{one}` or `{other}`, not both."
        raise BadRequest(message, param=other)
    return found[0] if found else None


def _formats(body: types.Generation) -> Iterator[OutputFormat]:
    if body.response_format is not None:
        yield from _response_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _structured_outputs(body.structured_outputs)
    yield from _constraints(
        ("json_schema", "guided_json", body.guided_json),
        ("regex", "guided_regex", body.guided_regex),
        ("choice", "guided_choice", body.guided_choice),
        ("grammar", "guided_grammar", body.guided_grammar),
        ("regex", "regex", body.regex),
        ("grammar", "ebnf", body.ebnf),
        ("json_schema", "json_schema", body.json_schema),
        ("grammar", "grammar", body.grammar),
    )


def _response_format(form: types.Format) -> Iterator[OutputFormat]:
    at = "response_format"
    match form.type:
        case "text":
            return
        case "json_object" if form.schema is not None:
            yield format_of_schema(form.schema, f"{at}.schema")
        case "json_object":
            yield OutputFormat("json_object", param=at)
        case "json_schema" if form.json_schema is not None:
            yield format_of_schema(form.json_schema.schema, f"{at}.json_schema.schema")
        case "json_schema":
            raise BadRequest(
                f"`{at}` of type 'json_schema' needs `json_schema` with `name` and `schema`.",
                param=f"{at}.json_schema",
            )
        case other:
            raise Unsupported(
                f"`{at}` {other[:64]!r} is not supported: use 'json_schema', 'json_object' or "
                "'text', or a field of `structured_outputs`.",
                param=at,
            )


def _structured_outputs(asked: types.StructuredOutputs) -> Iterator[OutputFormat]:
    at = "structured_outputs"
    for option in _UNSUPPORTED_OPTIONS:
        if getattr(asked, option):
            raise Unsupported(f"`{at}.{option}` is not supported.", param=f"{at}.{option}")
    if all(getattr(asked, name) is None for name in _FORMATS):
        names = ", ".join(f"`{name}`" for name in _FORMATS)
        raise BadRequest(f"`{at}` has no format: give it one of {names}.", param=at)
    if asked.json_object:
        yield OutputFormat("json_object", param=f"{at}.json_object")
    yield from _constraints(
        ("json_schema", f"{at}.json", asked.json),
        ("regex", f"{at}.regex", asked.regex),
        ("choice", f"{at}.choice", asked.choice),
        ("grammar", f"{at}.grammar", asked.grammar),
    )


def _constraints(
    *given: tuple[Literal["json_schema", "regex", "choice", "grammar"], str, Any],
) -> Iterator[OutputFormat]:
    """Yield the output format for each (kind, field, value) in `given` that the request sets.

    An empty string counts as not set, because some clients always send the field.
    """
    for kind, name, value in given:
        if value is None or value == "":
            continue
        match kind:
            case "json_schema":
                yield format_of_schema(_parse_schema(value, name), name)
            case "choice" if not value:
                raise BadRequest(f"`{name}` needs at least one string.", param=name)
            case "choice":
                yield OutputFormat(kind, msgspec.json.encode(value).decode(), name)
            case _:
                yield OutputFormat(kind, value, name)


def _parse_schema(value: str | dict[str, Any], field: str) -> dict[str, Any]:
    if not isinstance(value, str):
        return value
    try:
        return decode(dict[str, Any], value.encode())
    except BadRequest as error:
        raise BadRequest(f"`{field}` is not a JSON object: {error}", param=field) from error


# -- tools -----------------------------------------------------------------------------------


def read_tool_use(body: types.ChatRequest, rendered: Sequence[Function]) -> ToolUse:
    """Return which tools may be called, and how, as the body's `tool_choice` asks for.

    `rendered` are the body's tools in the form of `Chat.tools`. All are in the prompt, without
    `strict`, whatever `tool_choice` is, so that the beginning of the prompt stays the same.
    """
    choice = body.tool_choice or "auto"
    asked = types.ToolChoice(choice) if isinstance(choice, str) else choice
    if asked.type == "none" or (asked.type == "auto" and not rendered):
        return ToolUse()
    known = {tool["function"]["name"] for tool in rendered}
    found = _tool_choice(asked)
    if not known:
        raise BadRequest("`tool_choice` needs `tools`, and there are none.", param="tool_choice")
    for name in found.names:
        if name not in known:
            raise BadRequest(
                f"`tool_choice` names {name[:64]!r}, which is not one of `tools`.",
                param="tool_choice",
            )
    named = asked.type == "function"
    return ToolUse(
        tools=tuple(
            with_strict(shown) if tool.function and types.is_on(tool.function.strict) else shown
            for tool, shown in zip(body.tools or (), rendered, strict=True)
        ),
        choice=found,
        parallel=not named and body.parallel_tool_calls is not False,
        named=named,
    )


def _tool_choice(asked: types.ToolChoice) -> ToolChoice:
    match asked.type:
        case "auto":
            return ToolChoice()
        case "required" | "any":
            return ToolChoice(required=True)
        case "function" if name := _name(asked):
            return ToolChoice(required=True, names=(name,))
        case "function":
            raise BadRequest(
                "`tool_choice` of type 'function' needs the function's name.", param="tool_choice"
            )
        case "allowed_tools":
            return _allowed_tools(asked.allowed_tools)
        case "custom" | "tool":
            message = f"`tool_choice` {asked.type!r} is not supported: use 'function'."
            raise Unsupported(message, param="tool_choice")
    raise BadRequest(
        "`tool_choice` must be 'auto', 'none', 'required', or an object of type 'function' or "
        "'allowed_tools'.",
        param="tool_choice",
    )


def _allowed_tools(allowed: types.AllowedTools | None) -> ToolChoice:
    at = "tool_choice.allowed_tools"
    if allowed is None or not allowed.tools:
        raise BadRequest(f"`{at}` needs `mode`, and `tools` with at least one function.", param=at)
    names: list[str] = []
    for i, tool in enumerate(allowed.tools):
        name = _name(tool)
        if tool.type != "function" or not name:
            where = f"{at}.tools[{i}]"
            raise BadRequest(f"`{where}` must be a function with its name.", param=where)
        names.append(name)
    return ToolChoice(required=allowed.mode == "required", names=tuple(dict.fromkeys(names)))


def _name(tool: types.ToolChoice | types.AllowedTool) -> str | None:
    return tool.function.name if tool.function else tool.name
