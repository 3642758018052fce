"""The chat template of a model, and the errors of running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2.exceptions import TemplateError

from mlxcache.errors import (
    BadRequest,
    ConfigError,
    ContextLengthExceeded,
    GenerationFailed,
    MlxcacheError,
)
from mlxcache.model.chat_template import LIMIT, TemplateLimit, apply_chat_template
from mlxcache.prompt.tokenizer import ChatTokenizer

Message = dict[str, Any]

TEMPLATE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TemplateError,
    TypeError,
    ValueError,
)
"""Exceptions that templates raise, in Jinja or in Python."""

RESERVED = frozenset(
    """
    self messages conversation conversations tools documents chat_template tokenize
    add_generation_prompt continue_final_message sanitize_control_tokens padding truncation
    max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs
    """.split()  # noqa: SIM905 - read as a list of names
)
"""Arguments of transformers' renderer that no request may set."""


class Template:
    """The chat template of a tokenizer; if it has none, `render` uses `render_plain`.

    `exists`: whether the tokenizer has a template. `source`: its Jinja source if known, else None.
    """

    def __init__(self, tokenizer: ChatTokenizer):
        self._tokenizer = tokenizer
        self.exists = bool(tokenizer.has_chat_template)
        self.source = _source(getattr(tokenizer._tokenizer, "chat_template", None))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        generation: bool,
        args: Mapping[str, Any],
    ) -> str:
        """Render a conversation.

        `generation`: append the generation prompt. `args`: further arguments of the template.
        Raises BadRequest with the template's message if it refuses the conversation, or if a value
        is nested too deeply, ContextLengthExceeded for far more text than any context holds, and
        GenerationFailed if the template fails or exceeds a limit of `model.chat_template`.
        """
        if not self.exists:
            return render_plain(messages, self._start(), generation=generation)
        try:
            given = {"tools": list(tools) if tools else None, "add_generation_prompt": generation}
            text = apply_chat_template(
                self._tokenizer, list(messages), tokenize=False, **given, **args
            )
        except TimeoutError as error:
            raise GenerationFailed(f"the model's chat template took too long: {error}") from error
        except RecursionError as error:
            raise too_deep() from error
        except TemplateLimit as error:
            if len(str(messages)) > LIMIT // 2:
                raise ContextLengthExceeded(
                    f"prompt is too long: more than {LIMIT // 2:,} characters"
                ) from error
            raise GenerationFailed(f"the model's chat template failed: {error}") from error
        except TEMPLATE_ERRORS as error:
            if type(error) is TemplateError:
                raise BadRequest(
                    f"the model's chat template refuses this conversation: {error}",
                    param="messages",
                ) from error
            raise GenerationFailed(
                f"the model's chat template failed: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(text, str):
            raise GenerationFailed("the model's chat template returned no text")
        return text

    def _start(self) -> str:
        bos = getattr(self._tokenizer, "bos_token", None)
        if not bos:
            return ""
        ids = list(self._tokenizer.encode("a"))
        plain_ids = list(self._tokenizer.encode("a", add_special_tokens=False))
        return str(bos) if ids[: -len(plain_ids)] else ""


def check_arguments(template: Template, args: Mapping[str, Any]) -> None:
    """Raise ConfigError for template arguments that are reserved or make the template fail."""
    own = RESERVED & args.keys()
    if own:
        raise ConfigError(f"--chat-template-args: {min(own)!r} is set by the server; remove it")
    messages = [{"role": "user", "content": "hello"}]
    try:
        template.render(messages, generation=True, args=args)
    except MlxcacheError as error:
        try:
            template.render(messages, generation=True, args={})
        except MlxcacheError:
            return  # the arguments are not the cause
        raise ConfigError(f"--chat-template-args: with these arguments {error}") from error


def too_deep() -> BadRequest:
    """Return the error for a value nested deeper than Python's recursion limit."""
    return BadRequest("a value is nested too deeply", param="messages")


def render_plain(messages: Sequence[Message], start: str, *, generation: bool) -> str:
    """Render without a chat template: the name of each role, a colon, and the text.

    `start`: text at the start, such as the token that begins a sequence. `generation`: append the
    name of the assistant's role.
    """
    parts = [start]
    parts += [f"{message['role'].capitalize()}: {message['content']}\n\n" for message in messages]
    return "".join(parts) + ("Assistant:" if generation else "")


def _source(template: Any) -> str | None:
    if isinstance(template, str):
        return template
    if isinstance(template, Mapping):
        return "\n".join(str(text) for text in template.values())
    return None
