"""Rendering of conversations: escape them, adapt them to the template, and run it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxcache.common_prefix import common_characters
from mlxcache.errors import BadRequest, GenerationFailed, MlxcacheError
from mlxcache.lru import LRU
from mlxcache.prompt.adapt import adapt, leading_systems
from mlxcache.prompt.codec import Escape
from mlxcache.prompt.images import ImageTemplate, images_of
from mlxcache.prompt.template import (
    RESERVED,
    TOOL,
    TOOL_TURN,
    A,
    Message,
    Template,
    Traits,
    U,
    message_of,
    too_deep,
)
from mlxcache.types import Chat, Image

_USER, _REPLY = message_of("user", U), message_of("assistant", A)
_AFTER = {"user": (_USER,), "tool": TOOL_TURN}
_KEPT = 64


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered text, with sentinels in place of escaped control tokens.

    `generation`: character at which the generation prompt starts, or the text's length.
    """

    text: str
    generation: int
    images: tuple[Image, ...] = ()


class Renderer:
    def __init__(
        self,
        template: Template,
        traits: Traits,
        escape: Escape,
        args: Mapping[str, Any],
        images: ImageTemplate,
    ):
        self._template, self._traits, self._escape, self._args = template, traits, escape, args
        self._images = images
        self._generations: LRU[bytes, tuple[str | None]] = LRU(_KEPT)

    def render(self, chat: Chat) -> Rendered:
        """Render a conversation.

        Raises BadRequest if the request is the cause (also by its template arguments), else
        GenerationFailed.
        """
        try:
            return self._render(chat)
        except GenerationFailed as error:
            if not chat.template_args:
                raise
            # Raises GenerationFailed again where the arguments are not the cause.
            self._render(replace(chat, template_args={}))
            raise BadRequest(
                f"with these arguments {error}", param="chat_template_kwargs"
            ) from error

    def _render(self, chat: Chat) -> Rendered:
        if not chat.messages:
            raise BadRequest("there are no messages: send at least one", param="messages")
        try:
            messages, tools, args = self._adapted(chat, len(chat.messages))
        except RecursionError as error:
            raise too_deep() from error
        images = tuple(images_of(messages))
        if chat.continue_final:
            text = self._open(messages, tools, args)
            return Rendered(text, len(text), images)
        text = self._text(messages, tools, args, generation=True)
        prompt = self._generation(str(messages[-1]["role"]), args)
        if prompt is not None and text.endswith(prompt):
            return Rendered(text, len(text) - len(prompt), images)
        return Rendered(text, self._shared(text, messages, tools, args), images)

    def shared_characters(self, chat: Chat, leading: int, text: str) -> int:
        """Return how many leading characters `text` shares with a rendering of the first messages.

        0 of `leading` means only tools and system text. Returns 0 if the template refuses them.
        """
        messages, tools, args = self._adapted(chat, leading or leading_systems(chat.messages))
        return self._shared(text, messages, tools, args)

    def generation_prompt(self) -> str:
        """Return the generation prompt after a user message; empty if it is unknown."""
        return self._generation("user", dict(self._args)) or ""

    def probe(self, messages: Sequence[Message], *, tools: bool) -> str:
        """Render messages that no client sent, with or without an example tool.

        Raises BadRequest or GenerationFailed if the template refuses them or fails.
        """
        adapted = adapt(messages, (), self._traits)
        return self._text(adapted, [TOOL] if tools else None, self._args, generation=False)

    def _shared(
        self, text: str, messages: list[Message], tools: Any, args: Mapping[str, Any]
    ) -> int:
        asked = bool(messages) and messages[-1]["role"] == "user"
        for shown in (messages, [*messages, *((_REPLY, _USER) if asked else (_USER,))]):
            if not shown:
                continue
            try:
                return common_characters(text, self._text(shown, tools, args, generation=False))
            except MlxcacheError:
                continue
        return 0

    def _generation(self, role: str, args: Mapping[str, Any]) -> str | None:
        shown = f"{role} {json.dumps(args, sort_keys=True, default=repr)}"
        key = hashlib.blake2b(shown.encode(), digest_size=16).digest()
        known = self._generations.get(key)
        if known is None:
            known = (self._find_generation(role, args),)
            self._generations.put(key, known)
        return known[0]

    def _find_generation(self, role: str, args: Mapping[str, Any]) -> str | None:
        if role not in _AFTER:
            return None
        messages = adapt(_AFTER[role], (), self._traits)
        try:
            bare = self._text(messages, None, args, generation=False)
            full = self._text(messages, None, args, generation=True)
        except MlxcacheError:
            return None
        return full[len(bare) :] if full.startswith(bare) else None

    def _open(self, messages: list[Message], tools: Any, args: Mapping[str, Any]) -> str:
        """Render up to the end of the last message, to be continued, or raise BadRequest."""
        last = messages[-1]
        if last["role"] != "assistant" or last.get("tool_calls"):
            raise BadRequest(
                "only an assistant message without tool calls can be continued", param="messages"
            )
        last = {**last, "content": str(last.get("content") or "") + self._escape.end}
        text = self._text([*messages[:-1], last], tools, args, generation=False)
        end = text.rfind(self._escape.end)
        if end < 0:
            raise BadRequest(
                "the model's chat template cannot continue a message", param="messages"
            )
        return text[:end]

    def _adapted(self, chat: Chat, count: int) -> tuple[list[Message], list[Any], dict[str, Any]]:
        own = set(chat.template_args) & RESERVED
        if own:
            raise BadRequest(
                f"{min(own)!r} is set by the server and is no template argument: remove it",
                param="chat_template_kwargs",
            )
        args = {**self._args, **self._escape.escape_value(dict(chat.template_args))}
        tools = [self._escape.escape_value(tool) for tool in chat.tools]
        messages = [self._escape.escape_message(message) for message in chat.messages[:count]]
        return adapt(self._images.place(messages), tools, self._traits), tools, args

    def _text(
        self, messages: list[Message], tools: Any, args: Mapping[str, Any], *, generation: bool
    ) -> str:
        listed = tools if self._traits.tools else None
        shown, images = self._images.prepare(messages)
        text = self._template.render(shown, tools=listed, generation=generation, args=args)
        return self._images.expand(text, images)
