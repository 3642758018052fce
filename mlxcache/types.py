"""Frozen values that cross the boundaries between layers and threads.

Nothing here imports MLX, Starlette or mlx-lm, so every layer may use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
"""Token ids, shape (n,)."""

FinishReason = Literal[
    "stop", "stop_sequence", "length", "tool_calls", "repetition", "cancelled", "error"
]
"""Reason of a reply's end.

`stop`: the model ended its turn; `stop_sequence`: a stop string; `length`: max_tokens, the context
length or the memory budget; `repetition`: the reply repeated itself exactly."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image as it was sent: `data` is a PNG, JPEG, GIF or WebP file, `digest` its SHA-256."""

    data: bytes = field(repr=False, compare=False)
    digest: bytes


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens [start, end) of a prompt, in whose places one image is fed."""

    start: int
    end: int
    image: Image


TEXTS = "texts"
"""The key of an assistant's message for its text blocks, where `content` joins several."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation in the form that chat templates take, independent of the API.

    `messages` are OpenAI-shaped: `role` (system, developer, user, assistant, tool), `content`
    (a string; a user's that holds images is a list of strings and Images), and where they apply
    `reasoning_content`, `tool_calls` (each `{"id", "type": "function", "function": {"name",
    "arguments": dict}}`), `tool_call_id`, `name`, and `TEXTS`, which no template is given.
    `tools` are `{"type": "function", "function": {"name", "description", "parameters"}}`.
    `template_args` are keyword arguments of the template (`enable_thinking`, ...).
    `breakpoint` is the number of leading messages up to and including the last one that carries a
    cache_control mark; 0 marks tools or system alone; None: no mark.
    `keeps`: the client's requests to keep the prompt, each a number of leading messages and the
    seconds after each use; 0 messages are tools and system.
    `continue_final`: the last message is an assistant's, and the reply continues it.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    breakpoint: int | None = None
    continue_final: bool = False
    keeps: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The token ids that one request renders to.

    `ids` identify the prompt in the cache. In the places of `images` they are negative, and made
    from the image's digest, because two images of one size have the same tokens; `tokens` are then
    the ids that the model is fed. Without images `tokens` is None: `ids` are fed.
    `marks` are ascending token positions worth a checkpoint: the end of tools and system, of
    each message, and just before the generation prompt (the last one). `breakpoint` is the
    token position that `Chat.breakpoint` falls on, or None. `thinking_open`: the prompt ends
    inside a think block, so the first generated text is reasoning. `continued`: the prompt ends
    inside the text of an assistant's message, which the reply continues. `generic_tools`: the
    template has no tools, so they were described in the system text and calls come as
    `<tool_call>{json}</tool_call>`. `rules`: the rules of canonicalisation that changed the
    conversation. `names`: replacements in the reply, from the text that the model writes to the
    text that the client reads. `source`: the input of the rendering, for `prompt.explain`.
    `keeps`: the client's requests to keep a prefix, as (position, seconds after each use).
    """

    ids: Tokens
    marks: tuple[int, ...] = ()
    breakpoint: int | None = None
    thinking_open: bool = False
    continued: bool = False
    generic_tools: bool = False
    tokens: Tokens | None = None
    images: tuple[ImageSpan, ...] = ()
    rules: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    source: Any = field(default=None, repr=False)
    keeps: tuple[tuple[int, float], ...] = ()

    @property
    def fed(self) -> Tokens:
        """Ids that the model is fed, shape (n,)."""
        return self.ids if self.tokens is None else self.tokens


DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of `Sampling` for which a model may have defaults, named so in generation_config.json."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of sampling, as in mlx-lm.

    `temperature` 0 is greedy. `top_p` 1, `top_k` 0 and `min_p` 0 are off. `repetition_penalty`
    1 is off; it applies to the newest `repetition_context` tokens, prompt included.
    `xtc_probability` 0 is off: https://github.com/oobabooga/text-generation-webui/pull/6335.
    `logit_bias` pairs token ids with additive values. `seed` None draws a fresh one. `unset`:
    fields that the client did not state, for which the model may have a default of its own.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_context: int = 64
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    unset: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The form that a reply's visible text must have.

    `value` by `kind`: `json_schema` the schema as JSON text, `regex` a regular expression,
    `grammar` a Lark or GBNF grammar, `choice` a JSON list of strings, `json_object` empty.
    `param`: the field of the request's body that it came from, for errors.
    """

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice"]
    value: str = ""
    param: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools that a reply may or must call.

    `required`: the reply is at least one call. `names`: the tools that it may call; empty: any.
    """

    required: bool = False
    names: tuple[str, ...] = ()


WARMING = "warm"
"""The `Job.api` of prompts computed ahead of use, which are no turns of a session."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request as the engine takes it.

    `max_tokens` None: as many as the context leaves. `stop`: strings that end the reply and
    are not part of it. `tools` None: tool calls are returned as text.
    `top_logprobs` None: no log-probabilities; 0 to 20: those of the sampled token and of as many
    of the likeliest. `raw`: a plain completion, whose thinking and calls are returned as text.
    `retry`: the client marked the request as a retry. `timeout_s`: seconds from submission until
    it ends in DeadlineExceeded; None: the server's limit.
    `session` is a label for users, never a key of the cache. `title`: the beginning of the user's
    first message. `owner`: set by the engine; see `mlxcache.owner`.
    `choice`: the index of this reply among those of one client's request, which asked for several.
    `format`: the form of the visible text; None: free. `tool_choice` applies to `tools`; a tool
    whose `function` has `strict` true is called with valid arguments only. `thinking_budget`: most
    tokens of a think block; None: no limit.
    """

    id: str
    prompt: Prompt
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] | None = None
    tool_choice: ToolChoice = ToolChoice()
    parallel_tools: bool = True
    format: OutputFormat | None = None
    thinking_budget: int | None = None
    top_logprobs: int | None = None
    raw: bool = False
    session: str | None = None
    client: str | None = None
    title: str | None = None
    owner: str | None = None
    api: str = ""
    render_s: float = 0.0
    retry: bool = False
    timeout_s: float | None = None
    choice: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Text, log-probability (natural, after penalties and bias) and alternatives of one token.

    Bytes of a token that are no whole character are surrogate escapes in its text. `visible`: the
    token is a part of the visible text, not of thinking, calls or their markers.
    """

    token: str
    token_id: int
    logprob: float
    top: tuple[tuple[str, int, float], ...] = ()
    visible: bool = True


@dataclass(frozen=True, slots=True)
class Admitted:
    """Event: memory is reserved and the prefix matched. Counts are exact; cached + fed = prompt."""

    prompt_tokens: int
    cached_tokens: int
    restored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Event: prompt tokens in the model's cache so far, of all."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of visible text; empty where it carries only log-probabilities."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Thinking:
    """The next piece of reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call; `arguments` is a JSON object as a string."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a reply that did not fail."""

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    restored_tokens: int
    generated_tokens: int
    reasoning_tokens: int = 0
    stop_sequence: str | None = None


Piece = Text | Thinking | ToolCall
"""A part of a reply."""

Event = Admitted | Progress | Text | Thinking | ToolCall | Finished
"""An event of a stream, in the order Admitted, Progress..., Pieces..., Finished."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of the served model. Lengths are in tokens; `context_length` limits requests.

    `takes_effort`: the chat template has an argument `reasoning_effort`. `sampling`: the model's
    defaults for fields of `Sampling` that a client does not state.
    """

    id: str
    context_length: int
    max_context_length: int
    weights_bytes: int
    architecture: str
    has_thinking: bool
    has_tools: bool
    has_images: bool = False
    takes_effort: bool = False
    is_demo: bool = False
    created: int = 0
    draft: str | None = None  # the draft model's id
    sampling: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(slots=True)
class RequestRecord:
    """Record of one request; every number is counted, none estimated. Times are in seconds."""

    id: str
    session: str | None
    api: str
    client: str | None
    status: Literal["queued", "prefill", "decode", "done", "cancelled", "failed", "rejected"]
    created_at: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    fed_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # of the drafted ones
    timing: dict[str, float] = field(default_factory=dict)
    finish_reason: FinishReason | None = None
    error: str | None = None
    canonicalised: tuple[str, ...] = ()
    lost: dict[str, Any] | None = None
    owner: str | None = None
    joined: str | None = None  # id of the running request that this one joined
