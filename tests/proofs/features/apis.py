"""The four APIs, each as a client: bodies of a conversation's requests, and replies read from them.

A conversation is a list of entries, whose items are in the API's own form.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tests.proofs.features.plan import FORMATS, SCHEMA, TOOLS, ApiName, Features

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Entry:
    """What a user, a tool or the model said, in an API's form. `begun`: to be continued."""

    kind: Literal["user", "reply", "results", "begun"]
    items: tuple[Any, ...]
    text: str = ""


@dataclass(slots=True)
class Said:
    """One choice of a reply. `calls`: id, name and arguments. `logprobs`: token, its, likeliest."""

    text: str = ""
    thinking: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    finish: str | None = None
    stop: str | None = None
    logprobs: list[tuple[str, float, list[float]]] = field(default_factory=list)
    items: tuple[Any, ...] = ()

    @property
    def content(self) -> tuple[Any, ...]:
        """What tells a reply that a client sends back from others."""
        calls = [(name, arguments) for _, name, arguments in self.calls]
        return self.text.strip(), self.thinking.strip(), calls

    @property
    def shown(self) -> tuple[Any, ...]:
        """All that must be equal in two replies to one request, but log-probabilities."""
        tokens = [token for token, _, _ in self.logprobs]
        calls = [call[1:] for call in self.calls]  # without their ids
        return self.text, self.thinking, calls, self.finish, self.stop, tokens


@dataclass(slots=True)
class Reply:
    """A whole reply, the part of it that came, or an error with its status."""

    status: int
    id: str = ""
    error: str = ""
    choices: list[Said] = field(default_factory=list)
    prompt: int = 0
    cached: int = 0
    generated: int = 0
    reasoning: int = 0
    response_id: str | None = None
    complete: bool = False

    def usage(self, prompt: int, cached: int, generated: int, reasoning: int = 0) -> None:
        self.prompt, self.cached, self.generated = prompt, cached, generated
        self.reasoning = reasoning

    @property
    def pieces(self) -> bool:
        return any(one.text or one.thinking or one.calls for one in self.choices)


class Api(Protocol):
    """How one API says it. `thoughts`: the thinking of replies is sent back."""

    path: str

    def user(self, text: str) -> Entry: ...
    def begun(self, text: str) -> Entry: ...
    def results(self, said: Said, text: str) -> Entry: ...
    def answer(self, said: Said, begun: str, *, thoughts: bool) -> Entry: ...
    def body(self, talk: Sequence[Entry], system: str, wishes: Features) -> Json: ...
    def read(self, data: Json, reply: Reply) -> None: ...
    def add(self, event: Json, reply: Reply) -> None: ...


SAMPLING = ("top_p", "top_k", "min_p")
PENALTIES = {"presence": "presence_penalty", "frequency": "frequency_penalty"}


def generation(wishes: Features) -> Json:
    """Return the fields that OpenAI's APIs share. `stop` and `bias` are resolved."""
    temperature, seed = wishes.get("temperature", (0, None))
    body: Json = {"temperature": temperature} | ({} if seed is None else {"seed": seed})
    body |= {name: wishes[name] for name in SAMPLING if name in wishes}
    body |= {field: wishes[name] for name, field in PENALTIES.items() if name in wishes}
    if "xtc" in wishes:
        body["xtc_probability"], body["xtc_threshold"] = wishes["xtc"]
    if "repetition" in wishes:
        body["repetition_penalty"], body["repetition_context_size"] = wishes["repetition"]
    if "bias" in wishes:
        body["logit_bias"] = {str(token): value for token, value in wishes["bias"]}
    if wishes.get("stop"):
        body["stop"] = wishes["stop"] if len(wishes["stop"]) > 1 else wishes["stop"][0]
    if "n" in wishes:
        body["n"] = wishes["n"]
    return body


def output_format(name: str) -> Json:
    """Return the fields of chat and text completions for a format."""
    ((kind, value),) = FORMATS[name].items()
    if kind == "schema":
        shape = {"name": "it", "schema": value}
        return {"response_format": {"type": "json_schema", "json_schema": shape}}
    if kind == "object":
        return {"response_format": {"type": "json_object"}}
    return {f"guided_{kind}": value}


def function(tool: Mapping[str, Any]) -> Json:
    return {"type": "function", "function": dict(tool)}


class Chat:
    path = "/v1/chat/completions"

    def user(self, text: str) -> Entry:
        return Entry("user", ({"role": "user", "content": text},))

    def begun(self, text: str) -> Entry:
        return Entry("begun", ({"role": "assistant", "content": text},), text)

    def results(self, said: Said, text: str) -> Entry:
        made = ({"role": "tool", "tool_call_id": id, "content": text} for id, _, _ in said.calls)
        return Entry("results", tuple(made))

    def answer(self, said: Said, begun: str, *, thoughts: bool) -> Entry:
        message: Json = {"role": "assistant", "content": begun + said.text}
        if thoughts and said.thinking:
            message["reasoning_content"] = said.thinking
        if said.calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id, name, arguments in said.calls
            ]
        return Entry("reply", (message,))

    def body(self, talk: Sequence[Entry], system: str, wishes: Features) -> Json:
        messages = [{"role": "system", "content": system}] if system else []
        messages += [item for entry in talk for item in entry.items]
        body = {"messages": messages, "max_tokens": wishes["tokens"]} | generation(wishes)
        if "logprobs" in wishes:
            body |= {"logprobs": True, "top_logprobs": wishes["logprobs"]}
        if "format" in wishes:
            body |= output_format(wishes["format"])
        if "call" in wishes:
            body["tools"] = [function(tool) for tool in TOOLS]
            named = {"type": "function", "function": {"name": "paint"}}
            forced = {"named": named, "one": "required"}
            body["tool_choice"] = forced.get(wishes["call"], wishes["call"])
            if wishes["call"] == "one":
                body["parallel_tool_calls"] = False
        think = wishes.get("think")
        if isinstance(think, int):
            body["thinking_budget"] = think
        elif think is not None:
            body["enable_thinking"] = think == "on"
        return body

    def read(self, data: Json, reply: Reply) -> None:
        read_usage(data["usage"], reply)
        for choice in data["choices"]:
            message = choice["message"]
            calls = [
                (call["id"], call["function"]["name"], call["function"]["arguments"])
                for call in message.get("tool_calls") or ()
            ]
            thinking = message.get("reasoning_content") or ""
            said = Said(message["content"] or "", thinking, calls)
            end_choice(said, choice)
            if choice.get("logprobs"):
                said.logprobs = chat_logprobs(choice["logprobs"]["content"])
            reply.choices.append(said)

    def add(self, event: Json, reply: Reply) -> None:
        if event.get("usage"):
            read_usage(event["usage"], reply)
        for choice in event["choices"]:
            said, delta = of_index(reply, choice["index"]), choice["delta"]
            said.text += delta.get("content") or ""
            said.thinking += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                if "id" in call:
                    said.calls.append((call["id"], call["function"]["name"], ""))
                else:
                    id, name, so_far = said.calls[call["index"]]
                    arguments = so_far + call["function"]["arguments"]
                    said.calls[call["index"]] = (id, name, arguments)
            end_choice(said, choice)
            if choice.get("logprobs"):
                found = chat_logprobs(choice["logprobs"]["content"])
                said.logprobs += found


class Completions:
    """OpenAI's text completions. Items are texts; with `ids`, the prompt is sent as token ids."""

    path = "/v1/completions"

    def user(self, text: str) -> Entry:
        return Entry("user", (text if text.endswith(" ") else text + "\n",))

    def begun(self, text: str) -> Entry:
        return Entry("begun", (text,), text)

    def results(self, said: Said, text: str) -> Entry:
        return self.user(text)

    def answer(self, said: Said, begun: str, *, thoughts: bool) -> Entry:
        return Entry("reply", (begun + said.text,))

    def body(self, talk: Sequence[Entry], system: str, wishes: Features) -> Json:
        text = "".join([system, *(item for entry in talk for item in entry.items)]) or "So"
        prompt = wishes["encode"](text) if "ids" in wishes else text
        body = {"prompt": prompt, "max_tokens": wishes["tokens"]} | generation(wishes)
        if "logprobs" in wishes:
            body["logprobs"] = wishes["logprobs"]
        if "echo" in wishes:
            body["echo"] = True
        return body | (output_format(wishes["format"]) if "format" in wishes else {})

    def read(self, data: Json, reply: Reply) -> None:
        read_usage(data["usage"], reply)
        for choice in data["choices"]:
            said = Said(choice["text"])
            end_choice(said, choice)
            if choice.get("logprobs"):
                said.logprobs = text_logprobs(choice["logprobs"])
            reply.choices.append(said)

    def add(self, event: Json, reply: Reply) -> None:
        if event.get("usage"):
            read_usage(event["usage"], reply)
        for choice in event["choices"]:
            said = of_index(reply, choice["index"])
            said.text += choice["text"]
            end_choice(said, choice)
            if choice.get("logprobs"):
                said.logprobs += text_logprobs(choice["logprobs"])


class Messages:
    """Anthropic's messages. Always greedy: the API has no seed."""

    path = "/v1/messages"

    def user(self, text: str) -> Entry:
        return Entry("user", ({"role": "user", "content": text or "."},))

    def begun(self, text: str) -> Entry:
        return Entry("begun", ({"role": "assistant", "content": text.rstrip()},), text.rstrip())

    def results(self, said: Said, text: str) -> Entry:
        blocks = [
            {"type": "tool_result", "tool_use_id": id, "content": text} for id, _, _ in said.calls
        ]
        return Entry("results", ({"role": "user", "content": blocks},))

    def answer(self, said: Said, begun: str, *, thoughts: bool) -> Entry:
        blocks = [dict(one) for one in said.items or ({"type": "text", "text": said.text},)]
        if not thoughts:
            blocks = [one for one in blocks if one["type"] != "thinking"]
        if begun and blocks and blocks[0]["type"] == "text":
            blocks[0]["text"] = begun + blocks[0]["text"]
        elif begun:
            blocks.insert(0, {"type": "text", "text": begun})
        blocks = [one for one in blocks if one.get("text", "x").strip()]
        return Entry("reply", ({"role": "assistant", "content": blocks},) if blocks else ())

    def body(self, talk: Sequence[Entry], system: str, wishes: Features) -> Json:
        messages = [item for entry in talk for item in entry.items]
        body: Json = {
            "model": "any", "max_tokens": wishes["tokens"], "temperature": 0, "messages": messages,
        }  # fmt: skip
        if system:
            body["system"] = system
        if wishes.get("stop"):
            body["stop_sequences"] = wishes["stop"]
        if "format" in wishes:
            body["output_config"] = {"format": {"type": "json_schema", "schema": SCHEMA}}
        if "call" in wishes:
            body["tools"] = [
                {"name": tool["name"], "input_schema": tool["parameters"]} for tool in TOOLS
            ]
            kinds = {"required": "any", "named": "tool", "one": "any"}
            body["tool_choice"] = {"type": kinds.get(wishes["call"], wishes["call"])}
            if wishes["call"] == "named":
                body["tool_choice"]["name"] = "paint"
            elif wishes["call"] == "one":
                body["tool_choice"]["disable_parallel_tool_use"] = True
        think = wishes.get("think")
        if isinstance(think, int):
            body["thinking"] = {"type": "enabled", "budget_tokens": think}
        elif think is not None:
            body["thinking"] = {"type": "adaptive" if think == "on" else "disabled"}
        return body

    def read(self, data: Json, reply: Reply) -> None:
        self._usage(data["usage"], reply)
        said = Said(finish=data["stop_reason"], stop=data["stop_sequence"])
        said.items = tuple(data["content"])
        for block in said.items:
            said.text += block.get("text", "")
            said.thinking += block.get("thinking", "")
            if block["type"] == "tool_use":
                said.calls.append((block["id"], block["name"], json.dumps(block["input"])))
        reply.choices.append(said)

    def add(self, event: Json, reply: Reply) -> None:
        said = of_index(reply, 0)
        match event["type"]:
            case "message_start":
                self._usage(event["message"]["usage"], reply)
            case "content_block_start":
                said.items = (*said.items, dict(event["content_block"]))
            case "content_block_delta":
                self._grow(said, said.items[event["index"]], event["delta"])
            case "content_block_stop" if said.items[-1]["type"] == "tool_use":
                block = said.items[-1]
                block["input"] = json.loads(block.pop("json", "{}"))
                said.calls.append((block["id"], block["name"], json.dumps(block["input"])))
            case "message_delta":
                said.finish = event["delta"]["stop_reason"]
                said.stop = event["delta"]["stop_sequence"]
                self._usage(event["usage"], reply)

    def _grow(self, said: Said, block: Json, delta: Json) -> None:
        said.text += delta.get("text", "")
        said.thinking += delta.get("thinking", "")
        for name in ("text", "thinking", "signature"):
            if name in delta:
                block[name] = block.get(name, "") + delta[name]
        if "partial_json" in delta:
            block["json"] = block.get("json", "") + delta["partial_json"]

    def _usage(self, usage: Json, reply: Reply) -> None:
        read = usage["cache_read_input_tokens"]
        prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"] + read
        reply.usage(prompt, read, usage["output_tokens"])


class Responses:
    path = "/v1/responses"

    def user(self, text: str) -> Entry:
        return Entry("user", ({"role": "user", "content": text},))

    def begun(self, text: str) -> Entry:
        raise NotImplementedError("this API continues no message")

    def results(self, said: Said, text: str) -> Entry:
        kind = "function_call_output"
        made = ({"type": kind, "call_id": id, "output": text} for id, _, _ in said.calls)
        return Entry("results", tuple(made))

    def answer(self, said: Said, begun: str, *, thoughts: bool) -> Entry:
        part = {"type": "output_text", "text": said.text}
        items = said.items
        if said.text and not items:
            items = ({"type": "message", "role": "assistant", "content": [part]},)
        if not thoughts:
            items = tuple(one for one in items if one["type"] != "reasoning")
        return Entry("reply", items)

    def body(self, talk: Sequence[Entry], system: str, wishes: Features) -> Json:
        items = [item for entry in talk for item in entry.items]
        body = {"input": items, "max_output_tokens": wishes["tokens"]} | generation(wishes)
        if system:
            body["instructions"] = system
        if "logprobs" in wishes:
            body["include"] = ["message.output_text.logprobs"]
            body["top_logprobs"] = wishes["logprobs"]
        ((kind, value),) = FORMATS.get(wishes.get("format", ""), {"": None}).items()
        if kind == "schema":
            body["text"] = {"format": {"type": "json_schema", "name": "it", "schema": value}}
        elif kind == "object":
            body["text"] = {"format": {"type": "json_object"}}
        elif kind:
            body["structured_outputs"] = {kind: value}
        if "call" in wishes:
            body["tools"] = [{"type": "function", **tool} for tool in TOOLS]
            forced = {"named": {"type": "function", "name": "paint"}, "one": "required"}
            body["tool_choice"] = forced.get(wishes["call"], wishes["call"])
            if wishes["call"] == "one":
                body["parallel_tool_calls"] = False
        think = wishes.get("think")
        if isinstance(think, int):
            body["reasoning"] = {"max_tokens": think}
        elif think is not None:
            body["chat_template_kwargs"] = {"enable_thinking": think == "on"}
        return body

    def read(self, data: Json, reply: Reply) -> None:
        usage = data["usage"]
        cached = usage["input_tokens_details"]["cached_tokens"]
        reasoning = usage["output_tokens_details"]["reasoning_tokens"]
        reply.usage(usage["input_tokens"], cached, usage["output_tokens"], reasoning)
        reply.response_id = data["id"]
        said = of_index(reply, 0)
        text, thinking = said.text, said.thinking  # what a stream brought so far
        said.text = said.thinking = ""
        said.finish, said.items = data["status"], tuple(data["output"])
        for item in said.items:
            if item["type"] == "function_call":
                said.calls.append((item["call_id"], item["name"], item["arguments"]))
            for part in item.get("content") or ():
                said.text += part["text"] if item["type"] == "message" else ""
                said.thinking += part["text"] if item["type"] == "reasoning" else ""
                if part.get("logprobs"):
                    said.logprobs += chat_logprobs(part["logprobs"])
        assert not (text or thinking) or (text, thinking) == (said.text, said.thinking)

    def add(self, event: Json, reply: Reply) -> None:
        said = of_index(reply, 0)
        match event["type"]:
            case "response.output_text.delta":
                said.text += event["delta"]
            case "response.reasoning_text.delta":
                said.thinking += event["delta"]
            case "response.completed" | "response.incomplete":
                self.read(event["response"], reply)


APIS: Mapping[ApiName, Api] = {
    "chat": Chat(),
    "completions": Completions(),
    "messages": Messages(),
    "responses": Responses(),
}


def of_index(reply: Reply, index: int) -> Said:
    while len(reply.choices) <= index:
        reply.choices.append(Said())
    return reply.choices[index]


def end_choice(said: Said, choice: Json) -> None:
    said.finish = choice.get("finish_reason") or said.finish
    said.stop = choice.get("stop_reason") or said.stop


def read_usage(usage: Json, reply: Reply) -> None:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    reply.usage(usage["prompt_tokens"], cached, usage["completion_tokens"], reasoning)


def chat_logprobs(tokens: Iterable[Json]) -> list[tuple[str, float, list[float]]]:
    return [
        (one["token"], one["logprob"], [other["logprob"] for other in one["top_logprobs"]])
        for one in tokens
    ]


def text_logprobs(found: Json) -> list[tuple[str, float, list[float]]]:
    """What of each token is said; the first of a prompt has no log-probability, here 0."""
    lists = (found["tokens"], found["token_logprobs"], found["top_logprobs"])
    return [
        (a, b or 0.0, sorted((c or {}).values(), reverse=True))
        for a, b, c in zip(*lists, strict=True)
    ]
