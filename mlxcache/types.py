"""What crosses the boundaries between layers and threads: frozen values, no behaviour.

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

FinishReason = Literal["stop", "stop_sequence", "length", "tool_calls", "cancelled", "error"]
"""`stop`: the model ended its turn; `stop_sequence`: a stop string; `length`: max_tokens,
the context or the memory budget."""


@dataclass(frozen=True, slots=True)
class Image:
    """A picture as it was sent: `data` is a PNG, JPEG, GIF or WebP file, `digest` its SHA-256."""

    data: bytes = field(repr=False, compare=False)
    digest: bytes


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """The tokens of a prompt that one image is fed at: [start, end)."""

    start: int
    end: int
    image: Image


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation in the form that chat templates take, whichever API it came by.

    `messages` are OpenAI-shaped: `role` (system, developer, user, assistant, tool), `content`
    (a string; a user's that holds images is a list of strings and Images), and where they apply
    `reasoning_content`, `tool_calls` (each `{"id", "type": "function", "function": {"name",
    "arguments": dict}}`), `tool_call_id`, `name`.
    `tools` are `{"type": "function", "function": {"name", "description", "parameters"}}`.
    `template_args` go to the template as keyword arguments (`enable_thinking`, ...).
    `breakpoint` is the number of leading messages up to and with the last one that carries a
    cache_control mark; 0 marks tools or system alone; None: no mark.
    `keeps`: up to how many leading messages, and for how many seconds after each use, the client
    wishes the prompt kept; 0 messages are tools and system.
    `continue_final`: the last message is an assistant's, to be continued and not closed.
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

    `ids` are what the cache knows the prompt by. Where `images` stand, they are less than 0 and
    made from the image's digest, for two images of one size have the same tokens; `tokens` are
    then those that the model is fed. Without images it is None: they are `ids`.
    `marks` are ascending token positions worth a checkpoint: the end of tools and system, of
    each message, and just before the generation prompt (the last one). `breakpoint` is the
    token position that `Chat.breakpoint` falls on, or None. `thinking_open`: the prompt ends
    inside a think block, so the first generated text is reasoning. `generic_tools`: the template
    knows no tools, so they were described in the system text and calls come as
    `<tool_call>{json}</tool_call>`. `rules` of canonicalisation changed the conversation; the model
    may write the keys of `names`, and the client is to read the values in their place.
    `source`: what it was rendered from, for `prompt.explain`. `keeps`: clients' wishes, as
    (position, seconds after each use) up to where and for how long to keep it cached.
    """

    ids: Tokens
    marks: tuple[int, ...] = ()
    breakpoint: int | None = None
    thinking_open: bool = False
    generic_tools: bool = False
    tokens: Tokens | None = None
    images: tuple[ImageSpan, ...] = ()
    rules: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    source: Any = field(default=None, repr=False)
    keeps: tuple[tuple[int, float], ...] = ()

    @property
    def fed(self) -> Tokens:
        """The ids that the model is fed, shape (n,)."""
        return self.ids if self.tokens is None else self.tokens


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; the defaults are greedy-free plain sampling as mlx-lm has it.

    `temperature` 0 is greedy. `top_p` 1, `top_k` 0 and `min_p` 0 are off. `repetition_penalty`
    1 is off. `logit_bias` pairs token ids with additive values. `seed` None draws a fresh one.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None


WARMING = "warm"
"""The `Job.api` of what is computed ahead of use: no turn of a session."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request as the engine takes it.

    `max_tokens` None: as many as the context leaves. `stop`: strings that end the reply and
    are not part of it. `tools` None: tool calls are not parsed, their text is text.
    `top_logprobs` None: no log-probabilities; 0 to 20: those of the sampled token and so many of
    the likeliest. `raw`: a plain completion, in which thinking and calls are not told from text.
    `retry`: the client says that it asked for the same before. `timeout_s`: seconds from its
    submission until it ends in DeadlineExceeded, None: as the server has it.
    `session` is a label for people, never a key. `title`: how the first message of a person begins.
    `owner`: whose it is, which the engine finds out.
    """

    id: str
    prompt: Prompt
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] | None = None
    parallel_tools: bool = True
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


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token's text, log-probability (natural, after penalties and bias), and alternatives."""

    token: str
    token_id: int
    logprob: float
    top: tuple[tuple[str, int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Admitted:
    """Memory is reserved and the prefix is matched; all counts are exact. cached + fed = prompt."""

    prompt_tokens: int
    cached_tokens: int
    restored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Prompt tokens that the model's cache holds so far, of all."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Text:
    """The next piece of visible text. May be empty where only logprobs are carried."""

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
"""What a reply is made of."""

Event = Admitted | Progress | Text | Thinking | ToolCall | Finished
"""What a stream yields: Admitted, Progress..., Pieces..., Finished."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is served. Lengths are in tokens; requests are held to `context_length`."""

    id: str
    context_length: int
    max_context_length: int
    weights_bytes: int
    architecture: str
    has_thinking: bool
    has_tools: bool
    has_images: bool = False
    is_demo: bool = False
    created: int = 0
    draft: str | None = None  # the id of the model that drafts


@dataclass(slots=True)
class RequestRecord:
    """What one request did; every number is counted, none estimated. Times are in seconds."""

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
    joined: str | None = None  # the id of the same request that was running already
