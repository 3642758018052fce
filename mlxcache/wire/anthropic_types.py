"""Types of Anthropic's Messages bodies, with the fields that can change an answer.

All other fields are ignored. Blocks stay plain objects until `read_block`, so that an error can
name the block and its type. Source: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from mlxcache.errors import BadRequest
from mlxcache.wire.decode import convert, unsupported
from mlxcache.wire.openai_types import Falsy, Name, Switch, checked, given

RawBlock = Annotated[
    dict[str, Any], checked(properties={"type": {"type": "string"}}, required=["type"])
]
Content = str | list[RawBlock]


class Block(Struct):
    """Base class of content blocks."""


class Marked(Block, kw_only=True):
    cache_control: Any = None


class Text(Marked):
    text: str


class Thinking(Block):
    thinking: str = ""
    signature: str | None = None


class RedactedThinking(Block):
    """Reasoning that Anthropic encrypted. It is not part of the prompt."""


class ToolUse(Marked):
    id: str
    name: Name
    input: dict[str, Any] = {}


class ToolReference(Marked):
    tool_name: str


class ToolResult(Marked):
    tool_use_id: str
    content: Content | None = None
    is_error: bool | None = None


class Image(Marked):
    source: Any = None


class Source(Struct):
    type: str = ""
    data: str = ""
    content: Content = ""


class Citations(Struct):
    enabled: bool | None = None


class Document(Marked):
    source: Source
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None


class SearchResult(Marked):
    content: list[RawBlock]
    source: str = ""
    title: str = ""
    citations: Citations | None = None


class ServerToolUse(Marked):
    name: str
    input: Any = None


class ServerToolResult(Marked):
    type: str
    content: Any = None


class Compaction(Marked):
    content: str | None = None


class ToolChange(Marked):
    """Block of a system message that adds or removes a tool.

    `tool` is an object with the tool's `name`, or with its whole `definition`.
    """

    type: str
    tool: dict[str, Any]


class Fallback(Block):
    """Marker of the place where another model continued the reply. It is not part of the prompt."""


BLOCKS: dict[str, type[Block]] = {
    "text": Text,
    "thinking": Thinking,
    "redacted_thinking": RedactedThinking,
    "tool_use": ToolUse,
    "tool_reference": ToolReference,
    "tool_result": ToolResult,
    "image": Image,
    "document": Document,
    "search_result": SearchResult,
    "server_tool_use": ServerToolUse,
    "mcp_tool_use": ServerToolUse,
    "web_search_tool_result": ServerToolResult,
    "web_fetch_tool_result": ServerToolResult,
    "code_execution_tool_result": ServerToolResult,
    "bash_code_execution_tool_result": ServerToolResult,
    "text_editor_code_execution_tool_result": ServerToolResult,
    "tool_search_tool_result": ServerToolResult,
    "advisor_tool_result": ServerToolResult,
    "mcp_tool_result": ServerToolResult,
    "compaction": Compaction,
    "tool_addition": ToolChange,
    "tool_removal": ToolChange,
    "fallback": Fallback,
}


Effort = Literal["low", "medium", "high", "xhigh", "max"]


class MessageConfig(Struct):
    """Output settings in a system message, for the replies after it."""

    effort: Effort | None = None


class Message(Struct):
    """Message of a conversation; `clear_at` and `output_config` are for those of the role `system`.

    A system message with `clear_at` `next_user_message` is left out of the prompt once a user
    message follows it.
    """

    role: Literal["user", "assistant", "system"]
    content: Content | None = None
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: MessageConfig | None = None


class Tool(Struct):
    name: str = ""
    type: Annotated[str, checked(pattern="^(custom|(bash|text_editor|memory)_[^_]*)$")] | None = (
        None
    )
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: (
        Annotated[list[str], checked(anyOf=[{"maxItems": 0}, {"contains": {"const": "direct"}}])]
        | None
    ) = None
    max_characters: int | None = None
    defer_loading: bool | None = None
    strict: Switch | None = None
    cache_control: Any = None


class ToolChoice(Struct):
    type: Annotated[str, checked(enum=["auto", "any", "tool", "none"])]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Struct):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted", "updates"] | None = None
    budget_tokens: Annotated[int, Meta(ge=0)] | None = None


class Format(Struct):
    type: Annotated[str, checked(const="json_schema")]
    schema: dict[str, Any] | None = None


class OutputConfig(Struct):
    format: Format | None = None
    effort: Effort | None = None
    task_budget: Falsy = None


class Edit(Struct):
    """Entry of `context_management.edits`: a way to shorten a long conversation."""

    type: Annotated[str, checked(enum=["clear_thinking_20251015", "clear_tool_uses_20250919"])]


class ContextManagement(Struct):
    edits: list[Edit] = []


class Conversation(Struct, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`: everything that a prompt is rendered from.

    `mcp_servers`, `container`, `compaction` and `thread` are refused with a 400.
    """

    model: str
    messages: Annotated[
        list[
            Annotated[
                Message,
                checked(anyOf=[{"properties": {"role": {"const": "system"}}}, given("content")]),
            ]
        ],
        Meta(min_length=1),
    ]
    system: Content | None = None
    tools: (
        list[Annotated[Tool, checked(properties={"name": {"minLength": 1}}, required=["name"])]]
        | None
    ) = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    mcp_servers: Annotated[list[Any], checked(maxItems=0)] | None = None
    container: Falsy = None
    context_management: ContextManagement | None = None
    compaction: Falsy = None
    thread: Falsy = None
    cache_control: Any = None
    metadata: dict[str, Any] | None = None
    stop_sequences: (
        Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(max_length=16)] | None
    ) = None


class Request(Conversation, kw_only=True):
    """The body of `POST /v1/messages`.

    `mcp_servers`, `container`, `compaction` and `thread` are refused with a 400.
    """

    max_tokens: Annotated[int, Meta(ge=0)]
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    speculate: bool | None = None


def read_block(raw: RawBlock, where: str) -> Block:
    """Convert a content block to the type that its `type` names. `where`: its place in the body."""
    kind = raw.get("type")
    if not isinstance(kind, str):
        raise BadRequest(f"{where}.type: a string is required.", param=where)
    shape = BLOCKS.get(kind)
    if shape is None:
        raise unsupported(where, f"content of type {kind[:64]!r} is not supported.")
    return convert(raw, shape, where)
