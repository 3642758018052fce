"""Values that are passed between layers and threads.

All are immutable except `RequestRecord` and `Arrival`.
This module does not import MLX, Starlette or mlx-lm, so that every layer can use it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Never, cast, get_args, overload

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:

    class Tokens(np.ndarray[tuple[int], np.dtype[np.int32]]):
        """Token ids, shape (n,), made by `token_ids`, `ids_of_bytes` and `join_ids` only.

        Arrays when the program runs. The type checker refuses other arrays and lists for them, and
        knows that their slices and copies are token ids.
        """

        @overload  # type: ignore[override]
        def __getitem__(self, at: int | np.integer, /) -> np.int32: ...
        @overload
        def __getitem__(self, at: slice, /) -> Tokens: ...
        @overload
        def __getitem__(self, at: npt.NDArray[Any] | None, /) -> npt.NDArray[np.int32]: ...
        def __getitem__(self, at: Any, /) -> Any: ...
        def __setitem__(self, at: Never, value: Never, /) -> None: ...  # type: ignore[override]

else:
    Tokens = npt.NDArray[np.int32]


def token_ids(ids: npt.NDArray[np.int32] | Sequence[int]) -> Tokens:
    """Return integers as token ids, contiguous and read-only; an array is not copied if it is so.

    Raises TypeError for what is not integers, or an array that is not int32 of shape (n,), and
    OverflowError for integers beyond int32.
    """
    if not isinstance(ids, np.ndarray):
        ids = np.frombuffer(array("i", ids), np.int32)
    if ids.dtype != np.int32 or ids.ndim != 1:
        raise TypeError(f"token ids must be int32 of shape (n,), not {ids.dtype} {ids.shape}")
    return _sealed(np.ascontiguousarray(ids).view())


def ids_of_bytes(raw: bytes | memoryview) -> Tokens:
    return _sealed(np.frombuffer(raw, np.int32).copy())


def join_ids(*parts: Tokens) -> Tokens:
    """Return token ids one after the other, in an array that shares no memory with `parts`."""
    return _sealed(np.concatenate(parts, dtype=np.int32, casting="no"))


def _sealed(made: npt.NDArray[np.int32]) -> Tokens:
    made.setflags(write=False)
    return cast(Tokens, made)


NO_TOKENS = token_ids(())

GuessSource = Literal["draft", "heads", "history"]
"""Source of drafted tokens: a draft model, the model's heads, or what the conversation says."""

FinishReason = Literal[
    "stop", "stop_sequence", "length", "tool_calls", "repetition", "cancelled", "error"
]
"""Reason why a reply ended.

`length`: max_tokens, the context length or the memory budget; `repetition`: the reply repeated
itself exactly.
"""


@dataclass(frozen=True, slots=True)
class Image:
    """An image as it was sent: the content of a PNG, JPEG, GIF or WebP file, and its SHA-256.

    `where` is its place in the request's body, for errors.
    """

    data: bytes = field(repr=False, compare=False)
    digest: bytes
    where: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Tokens [start, end) of a prompt, at which one image is fed to the model.

    `grid`: numbers of rows and columns of the image's tokens, which come row by row; the model
    gives each token the position of its row and column. None: the positions are consecutive, as in
    text.
    """

    start: int
    end: int
    image: Image
    grid: tuple[int, int] | None = None


TEXTS = "texts"
"""Key of a message with its text blocks, if `content` joins several of them."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation in the form that chat templates take, independent of the API.

    `messages` are in OpenAI's form, except that the content of a user or tool with images is a list
    of strings and Images, that arguments of tool calls are dicts, and that a message of an
    assistant or a user may have the key `TEXTS`, which is not passed to templates. `template_args`
    are keyword arguments of the template.

    `breakpoint` is the number of leading messages up to and including the last one with a
    `cache_control` field; 0 if only tools or system have one, None if nothing has.
    `continue_final`: the reply continues the last message, the assistant's. `keeps` are requests of
    the client to keep the prompt cached: a number of leading messages (0: tools and system) and the
    seconds to keep them after each use.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    template_args: Mapping[str, Any] = field(default_factory=dict)
    breakpoint: int | None = None
    continue_final: bool = False
    keeps: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The token ids to which a request renders; `prompt.ChatPrompt` if it has a conversation.

    `ids` identify the prompt in the cache, and are fed to the model unless `tokens` is set: for a
    prompt with images, whose places in `ids` have negative numbers made from the image's digest,
    since images of one size have the same tokens.

    `marks` are ascending positions at which a checkpoint is useful: the ends of tools and system
    and of each message, and the start of the reply. `breakpoint` is the position of
    `Chat.breakpoint`. `thinking_open`: the prompt ends inside a think block. `continued`: it ends
    inside an assistant message, which the reply continues. `generic_tools`: the template does not
    support tools, so that calls have the form `<tool_call>{json}</tool_call>`. `rules` of
    canonicalisation changed the conversation. `names` maps text that the model writes to the text
    that the client receives instead. `keeps`: positions up to which to keep the prompt, and for how
    many seconds after each use. `replies`: keys of the known replies in it. `param`: the field of
    a request that has it.
    """

    param: ClassVar = "prompt"
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
    keeps: tuple[tuple[int, float], ...] = ()
    replies: tuple[bytes, ...] = ()

    @property
    def fed(self) -> Tokens:
        """Token ids that are fed to the model, shape (n,)."""
        return self.ids if self.tokens is None else self.tokens


DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of `Sampling` for which a model may have defaults, named so in generation_config.json."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters, as in mlx-lm.

    A `temperature` of 0 is greedy. These values are off: `top_p` 1, `top_k` 0, `min_p` 0,
    `xtc_probability` 0, `repetition_penalty` 1, and 0 for the other penalties, which count the
    tokens of the reply. The repetition penalty applies to the newest `repetition_context` tokens,
    including the prompt. `logit_bias` pairs token ids with values to be added. `allowed_tokens`, if
    any, are the only ones drawn. `stop_tokens` end the reply as the model's own do; none that ends
    it is drawn before `min_tokens`. A format is stronger than both. If `seed` is None, a random one
    is used. `unset` are the fields that the client omitted, for which the model may have
    defaults. Source of XTC: https://github.com/oobabooga/text-generation-webui/pull/6335
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
    allowed_tokens: tuple[int, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    min_tokens: int = 0
    seed: int | None = None
    unset: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Format that a reply's visible text must have.

    `value` is a JSON schema, a regular expression, a Lark or GBNF grammar, a JSON list of strings
    for `choice`, or empty for `json_object`. `param` is the field of the request body that required
    the format, for errors.
    """

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice"]
    value: str = ""
    param: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Tools that a reply may or, if `required`, must call: those in `names`, or else all."""

    required: bool = False
    names: tuple[str, ...] = ()


WARMING = "warm"
"""Value of `Job.api` for prompts that are computed ahead of use and are not turns of a session."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request to the engine.

    `max_tokens`: None means as many as the context leaves. `shows_stop`: the string of `stop` that
    ends the reply is part of it. `tools`: with None, calls are returned
    as text; calls of a tool whose `function` has `strict` true always have valid arguments.
    `parallel_tools`: the reply may have several calls; if false, the first one ends it.
    `thinking_budget`: most tokens of a think block. `top_logprobs`: None for no log-probabilities,
    else those of the sampled token and of so many alternatives are reported. `raw`: a plain
    completion, whose thinking and calls are returned as text. `prompt_logprobs`: those of the
    prompt's tokens are reported too, as `PromptLogprobs`; so all of it is computed, and none of its
    KV is kept. Only then `max_tokens` may be 0, for no reply.

    `session`: a label for users, never a key of the cache. `title`: the beginning of the user's
    first message. `owner` is set by the engine. `api`: the kind of request, such as "messages", or
    `WARMING`. `render_s`, `loaded_s`: seconds that rendering took, and that the request waited for
    the first load of its model. `retry`: the client marked the request as a retry. `timeout_s`:
    seconds from submission until it ends in DeadlineExceeded. `choice`: index of this reply among
    those that one request of the client asked for. `speculate`: guesses and drafts may
    be checked. `response`: id under which the client can retrieve the reply. `priority`: of its
    owner's waiting requests, those with a higher one start first.
    """

    id: str
    prompt: Prompt
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    shows_stop: bool = False
    tools: tuple[Mapping[str, Any], ...] | None = None
    tool_choice: ToolChoice = ToolChoice()
    parallel_tools: bool = True
    format: OutputFormat | None = None
    thinking_budget: int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    raw: bool = False
    session: str | None = None
    client: str | None = None
    title: str | None = None
    owner: str | None = None
    api: str = ""
    render_s: float = 0.0
    loaded_s: float = 0.0
    retry: bool = False
    timeout_s: float | None = None
    choice: int = 0
    speculate: bool = True
    response: str | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Text, natural log-probability after penalties and bias, and likeliest alternatives of a
    token.

    `top`: (text, id, log-probability). Bytes that are not a whole character are surrogate escapes
    in the text. `visible`: the token is part of the visible text, not of thinking, calls or their
    markers. `logprob` is NaN for the first token of a prompt.
    """

    token: str
    token_id: int
    logprob: float
    top: tuple[tuple[str, int, float], ...] = ()
    visible: bool = True


@dataclass(frozen=True, slots=True)
class Admitted:
    """Event: memory is reserved for a request, and the cached part of its prompt is known."""

    prompt_tokens: int
    cached_tokens: int
    restored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """Event: `done` of the `total` tokens of a prompt are computed or were cached."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Event: the log-probabilities of a prompt's tokens."""

    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """Event: the next piece of visible text, which is empty if it has only log-probabilities."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Thinking:
    """Event: the next piece of reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Event: a complete tool call. `arguments` is a JSON object as text."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Event: the end of a reply that did not fail. Counts are in tokens.

    `reason` is not `error`: a failure ends the stream with an exception. `reasoning_tokens`: those
    of the generated tokens that are thinking.
    """

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    restored_tokens: int
    generated_tokens: int
    reasoning_tokens: int = 0
    stop_sequence: str | None = None


Piece = Text | Thinking | ToolCall

Event = Admitted | Progress | PromptLogprobs | Text | Thinking | ToolCall | Finished
"""An event of a stream, in the order Admitted, Progress..., Pieces..., Finished.

`PromptLogprobs` comes before the pieces.
"""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of the served model. Lengths are in tokens.

    `context_length` limits requests, and `max_context_length` is the model's own limit.
    `architecture`: the model_type of config.json. `created`: time of the last change of that file,
    in seconds since 1970. `takes_effort`: the chat template has an argument `reasoning_effort`.
    `sampling`: defaults for fields of `Sampling` that a client omits. `backend`: "mlx-lm" or
    "mlx-vlm".
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
    backend: str = "mlx-lm"


@dataclass(slots=True)
class Guessed:
    """Drafted tokens of one source, those accepted, and passes of the model that checked them.

    `saved_s`: the seconds saved by them, below 0 if they cost more.
    """

    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    saved_s: float = 0.0

    def note_pass(self, checked: int, right: int) -> None:
        self.drafted += checked
        self.accepted += right
        self.passes += 1

    def note_saved(self, seconds: float) -> None:
        self.saved_s = round(self.saved_s + seconds, 6)


@dataclass(slots=True)
class RequestRecord:
    """Numbers of one request so far. Times are in seconds.

    `guesses`: has all sources from the start, as other threads read it. `timing`: durations by
    name, such as `render_s` or `decode_s`. `lost`: description of a prefix loss as in
    `GET /v1/requests`. `joined`: id of the running request whose reply this one shares. `model`:
    label of the model. `session`: label of its session, or the id if there is none; `session_id`:
    the id, if there is a label.
    """

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
    guesses: dict[GuessSource, Guessed] = field(
        default_factory=lambda: {source: Guessed() for source in get_args(GuessSource)}
    )
    timing: dict[str, float] = field(default_factory=dict)
    finish_reason: FinishReason | None = None
    error: str | None = None
    canonicalised: tuple[str, ...] = ()
    lost: dict[str, Any] | None = None
    owner: str | None = None
    joined: str | None = None
    model: str | None = None
    session_id: str | None = None

    @property
    def drafted_tokens(self) -> int:
        return sum(one.drafted for one in self.guesses.values())

    @property
    def accepted_tokens(self) -> int:
        return sum(one.accepted for one in self.guesses.values())

    @property
    def guess_passes(self) -> int:
        return sum(one.passes for one in self.guesses.values())

    @property
    def guess_saved_s(self) -> float:
        return round(sum(one.saved_s for one in self.guesses.values()), 6)

    @property
    def guess_source(self) -> GuessSource | None:
        """Return the source whose tokens most passes checked."""
        source, most = max(self.guesses.items(), key=lambda pair: pair[1].passes)
        return source if most.passes else None


@dataclass(slots=True)
class Arrival:
    """A request whose prompt is not known yet, because its model may have to be loaded first.

    `record`: its record while it waits for the model, else None.
    """

    id: str
    api: str
    session: str | None = None
    client: str | None = None
    owner: str | None = None
    timeout_s: float | None = None
    record: RequestRecord | None = None

    def note_waiting(self, record: RequestRecord | None) -> None:
        self.record = record
