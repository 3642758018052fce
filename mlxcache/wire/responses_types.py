"""Types of Responses API bodies, with the fields and items that can change an answer.

Sampling fields and extensions of local servers are those of `openai_types.Generation`. All other
fields are ignored. Source: https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.wire.decode import convert
from mlxcache.wire.openai_types import Effort, Generation, Limit, Name, Switch, checked

RawItem = Annotated[dict[str, Any], checked(minProperties=1)]
"""An input item as it was sent. It is stored in this form."""


# -- input -----------------------------------------------------------------------------------


class Part(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None


class Message(Struct):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part] | None = None


class FunctionCall(Struct):
    """A function call in the history. `arguments` is JSON text, or an object from some clients."""

    name: Name
    call_id: Name
    arguments: str | dict[str, Any] | None = None
    namespace: str | None = None


class CustomCall(Struct):
    name: Name
    call_id: Name
    input: str
    namespace: str | None = None


class CallOutput(Struct):
    call_id: Name
    output: str | list[Part] | None = None


class ReasoningText(Struct):
    text: str = ""


class Reasoning(Struct):
    content: list[ReasoningText] | None = None
    summary: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class LocalShellCall(Struct):
    """A call of the shell built into older versions of Codex."""

    call_id: Name | None = None
    id: Name | None = None
    action: dict[str, Any] | None = None


class Compaction(Struct):
    """A summary in place of the conversation before it, from `POST /v1/responses/compact`."""

    encrypted_content: str


class CompactionTrigger(Struct):
    """The last item of a request whose reply is an item `compaction`."""


Item = (
    Message
    | FunctionCall
    | CustomCall
    | CallOutput
    | Reasoning
    | LocalShellCall
    | Compaction
    | CompactionTrigger
)

TRIGGER = "compaction_trigger"

ITEMS: Mapping[str, type[Item]] = {
    "message": Message,
    "function_call": FunctionCall,
    "function_call_output": CallOutput,
    "custom_tool_call": CustomCall,
    "custom_tool_call_output": CallOutput,
    "local_shell_call": LocalShellCall,
    "local_shell_call_output": CallOutput,
    "reasoning": Reasoning,
    "compaction": Compaction,
    "compaction_summary": Compaction,  # as some versions of Codex call it
    TRIGGER: CompactionTrigger,
}

IGNORED_ITEMS = frozenset({"web_search_call", "image_generation_call"})
"""Types of items to ignore: calls of tools on OpenAI's servers, in a history from there."""


def is_reference(raw: RawItem) -> bool:
    """Return whether an input item stands for a stored one. `type` may be left out."""
    return raw.get("type") == "item_reference" or (
        not raw.get("type") and "id" in raw and raw.keys() <= {"type", "id"}
    )


def read_item(raw: RawItem, where: str) -> Item | None:
    """Convert an input item to the type that its `type` names. `where`: its place in the body.

    Returns None if the item has no text for the model.
    """
    kind = raw.get("type", "message" if "role" in raw else None)
    if not isinstance(kind, str):
        raise BadRequest(f"{where}.type: a string is required.", param=where)
    if kind in IGNORED_ITEMS:
        return None
    shape = ITEMS.get(kind)
    if shape is None:
        message = f"{where}: items of type {kind[:64]!r} are not supported."
        raise Unsupported(message, param=f"{where}.type")
    return convert(raw, shape, where)


# -- tools and output ------------------------------------------------------------------------

LEFT_OUT = frozenset({"web_search", "web_search_preview", "image_generation"})
"""Types of tools that only OpenAI's servers run, but that Codex sends by default.

They are left out of the prompt and named in the reply's metadata. Other such tools are refused."""


class CustomFormat(Struct):
    """The text that a custom tool accepts: free text, or text that follows a grammar."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class Tool(Struct):
    """A tool, or a group of tools. `tools` are those of a group, whose type is `namespace`.

    `format` is for custom tools.
    """

    type: Annotated[str, checked(enum=["function", "custom", "namespace", *sorted(LEFT_OUT)])]
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Switch | None = None
    format: CustomFormat | None = None
    tools: list[dict[str, Any]] | None = None


class AllowedTool(Struct):
    type: str
    name: str | None = None
    namespace: str | None = None


class ToolChoice(Struct):
    """The object form of `tool_choice`. `mode` and `tools` are for the type `allowed_tools`.

    `namespace` is the name of the group that has the tool `name`, if it is in one.
    """

    type: Annotated[
        str, checked(enum=["auto", "none", "required", "function", "custom", "allowed_tools"])
    ]
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[AllowedTool] | None = None


class TextFormat(Struct):
    """The format of the visible text.

    The fields besides `type` belong to a JSON schema.
    """

    type: Annotated[str, checked(enum=["text", "json_object", "json_schema"])]
    schema: dict[str, Any] | None = None
    name: str | None = None
    strict: Switch | None = None


class TextConfig(Struct):
    """Settings of the visible text: its format, and `verbosity`, which has no effect."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Struct):
    """The effort of reasoning, or its maximum tokens. `summary` has no effect."""

    effort: Effort | None = None
    summary: str | None = None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None


Empty = Annotated[Any, checked(enum=[None, [], {}])]


class ResponsesRequest(Generation, kw_only=True):
    """The body of POST /v1/responses. `input` is a text or a list of items.

    `background`, `conversation`, `prompt` and `context_management` are refused with a 400, as is an
    `n` or `best_of` other than 1.
    """

    input: str | list[RawItem] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[str, checked(enum=["auto", "none", "required"])] | ToolChoice | None = (
        None
    )
    parallel_tool_calls: bool | None = None
    n: Annotated[int, checked(const=1)] | None = None
    best_of: Annotated[int, checked(const=1)] | None = None
    max_output_tokens: Limit | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    background: Annotated[bool, checked(const=False)] | None = None
    conversation: Empty = None
    prompt: Empty = None
    context_management: Empty = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
