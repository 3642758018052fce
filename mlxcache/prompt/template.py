"""Rendering a conversation with the model's chat template."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jinja2.exceptions import TemplateError

from mlxcache.errors import BadRequest, ConfigError, GenerationFailed, MlxcacheError
from mlxcache.prompt.time_limit import run_limited
from mlxcache.prompt.tokenizer import ChatTokenizer

log = logging.getLogger(__name__)

Message = dict[str, Any]

TEMPLATE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TemplateError,
    TypeError,
    ValueError,
)
"""What templates, in Jinja or in Python, raise."""

RESERVED = frozenset(
    """
    self messages conversation conversations tools documents chat_template tokenize
    add_generation_prompt continue_final_message sanitize_control_tokens padding truncation
    max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs
    """.split()  # noqa: SIM905 - read as a list of names
)
"""Arguments of the renderer itself, which no request may set."""


RENDER_SECONDS = 30.0
"""Longer than any conversation takes to render; a template that takes it does not end."""


class Template:
    """The chat template of a tokenizer; without one, a plain form of role names and text.

    `source` is its Jinja source where that is known.
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
        """The text of a conversation, with or without the generation prompt.

        Raises BadRequest in the template's own words where it refuses the conversation, and
        GenerationFailed where it breaks.
        """
        if not self.exists:
            return plain(messages, self._start(), generation=generation)
        try:
            given = {"tools": list(tools) if tools else None, "add_generation_prompt": generation}
            rendered = partial(
                self._tokenizer.apply_chat_template, list(messages), tokenize=False, **given, **args
            )
            text = run_limited(rendered, RENDER_SECONDS)
        except TimeoutError as error:
            raise GenerationFailed(f"the model's chat template does not end: {error}") from error
        except RecursionError as error:
            raise too_deep() from error
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
    """Raise ConfigError for arguments with which the template cannot render what it else can."""
    if not template.exists:
        log.warning("the model has no chat template: conversations are written as plain text")
    own = RESERVED & args.keys()
    if own:
        raise ConfigError(f"--chat-template-args: {min(own)!r} is the server's own")
    messages = [{"role": "user", "content": "hello"}]
    try:
        template.render(messages, generation=True, args=args)
    except MlxcacheError as error:
        try:
            template.render(messages, generation=True, args={})
        except MlxcacheError:
            return  # not for the arguments' sake
        raise ConfigError(f"--chat-template-args: with these {error}") from error


def too_deep() -> BadRequest:
    """What a value nested beyond Python's stack is answered with."""
    return BadRequest("a value is nested too deeply", param="messages")


def plain(messages: Sequence[Message], start: str, *, generation: bool) -> str:
    """The form for models without a chat template: a role's name, a colon, the text."""
    parts = [start]
    parts += [f"{message['role'].capitalize()}: {message['content']}\n\n" for message in messages]
    return "".join(parts) + ("Assistant:" if generation else "")


def _source(template: Any) -> str | None:
    if isinstance(template, str):
        return template
    if isinstance(template, Mapping):
        return "\n".join(str(text) for text in template.values())
    return None
