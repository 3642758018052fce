"""Images in conversations: how a template writes them, and which token ids stand for them.

A template writes one token for an image. The model's image processor replaces it by as many tokens
as the image has embedding rows. Those tokens are the same for two images of one size, so the cache
identifies a prompt by ids that are derived from the content of its images.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from mlxcache.errors import BadRequest, GenerationFailed, MlxcacheError
from mlxcache.prompt.adapt import adapt
from mlxcache.prompt.template import (
    R2,
    TOOL_TURN,
    U2,
    Message,
    R,
    Template,
    Traits,
    U,
    message_of,
)
from mlxcache.types import Image, ImageSpan, Tokens, token_ids

PARTS: tuple[Message, ...] = (
    {"type": "image_url", "image_url": {"url": "data:,"}},
    {"type": "image", "image": "data:,"},
)

IMAGE_RESULT = "The result is an image; it follows."
"""Text of a tool result of images alone, if the template does not render them there."""


class ImageProcessor(Protocol):
    """Interface of a model's image processor, such as `model.vision.Vision`.

    `image_token`: text that a template writes for an image. `token_id`: id of one embedding row of
    an image. `text` returns the text of all its rows, `grid` the (rows, columns) in which they lie,
    or None if their positions are consecutive, as those of text.
    """

    image_token: str
    token_id: int

    def text(self, image: Image) -> str: ...

    def grid(self, image: Image) -> tuple[int, int] | None: ...


class ImageTemplate:
    """Writes images into the input and output of one chat template. Thread-safe.

    The constructor detects, by rendering, how and where the template supports images. `processor`
    is None if the model takes none.
    """

    def __init__(
        self,
        template: Template,
        processor: ImageProcessor | None,
        args: Mapping[str, Any],
        traits: Traits,
    ):
        self._processor = processor
        token = processor.image_token if processor is not None else ""
        self._part = _find_part(template, token, args) if token else None
        self.in_results = self._part is not None and _shows_results(
            template, token, self._part, args, traits
        )

    @property
    def supported(self) -> bool:
        return self._part is not None

    def place(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with images only where the template renders them.

        Other images of tool results go to the start of the next user message, or into a new one.
        """
        if self.in_results:
            return list(messages)
        placed: list[Message] = []
        waiting: list[str | Image] = []
        for given in messages:
            message, role, content = dict(given), given.get("role"), given.get("content")
            if role == "tool" and isinstance(content, list):
                shown = [part for part in content if isinstance(part, Image)]
                text = "\n\n".join(part for part in content if isinstance(part, str))
                message["content"] = text or (IMAGE_RESULT if shown else "")
                waiting += shown
            elif waiting and role == "user":
                parts = content if isinstance(content, list) else [str(content or "")]
                message["content"], waiting = [*waiting, *parts], []
            elif waiting and role != "tool":
                placed.append({"role": "user", "content": waiting})
                waiting = []
            placed.append(message)
        return [*placed, {"role": "user", "content": waiting}] if waiting else placed

    def prepare(self, messages: Sequence[Message]) -> tuple[list[Message], list[Image]]:
        found = images_of(messages)
        if found and self._part is None:
            raise BadRequest("this model takes no images", param="messages")
        shown = [
            {**message, "content": self._parts(message["content"])}
            if isinstance(message.get("content"), list)
            else message
            for message in messages
        ]
        return shown, found

    def _parts(self, content: Sequence[str | Image]) -> list[Any]:
        parts: list[Any] = []
        for is_image, run in groupby(content, lambda item: isinstance(item, Image)):
            if is_image:
                parts += [self._part for _ in run]
            elif text := "".join(map(str, run)):
                parts.append({"type": "text", "text": text})
        return parts

    def expand(self, text: str, images: Sequence[Image]) -> str:
        """Replace each image's token in a rendered text by the text of all its embedding rows."""
        if not images:
            return text
        assert self._processor is not None
        pieces = text.split(self._processor.image_token)
        if len(pieces) != len(images) + 1:
            raise BadRequest(
                "the model's chat template has no place for an image there", param="messages"
            )
        written = [pieces[0]]
        for image, piece in zip(images, pieces[1:], strict=True):
            written += [self._text(image), piece]
        return "".join(written)

    def _text(self, image: Image) -> str:
        """Return the text of an image's rows; an error names its place in the body."""
        assert self._processor is not None
        try:
            return self._processor.text(image)
        except BadRequest as error:
            if not image.where:
                raise
            raise BadRequest(f"{image.where}: {error}", param=image.where) from error

    def locate(self, ids: Tokens, images: Sequence[Image]) -> tuple[Tokens, tuple[ImageSpan, ...]]:
        """Return the ids that identify a prompt in the cache, and the spans of its images.

        `ids`: as the model reads them. Raises GenerationFailed if they do not match `images`.
        """
        assert self._processor is not None
        at = np.flatnonzero(ids == self._processor.token_id)
        spans: list[ImageSpan] = []
        done = 0
        for image in images:
            count = self._processor.text(image).count(self._processor.image_token)
            own = at[done : done + count]
            if not count or len(own) < count or own[-1] - own[0] != count - 1:
                raise GenerationFailed(
                    "the tokens of an image are not at its position in the prompt"
                )
            grid = self._processor.grid(image)
            spans.append(ImageSpan(int(own[0]), int(own[-1]) + 1, image, grid))
            done += count
        if done != len(at) or (spans and spans[-1].end == len(ids)):
            raise GenerationFailed("there are image tokens without an image")
        return ids_with_digests(ids, spans), tuple(spans)


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[Image]:
    return [
        part
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, Image)
    ]


def ids_with_digests(ids: Tokens, spans: Sequence[ImageSpan]) -> Tokens:
    """Return a copy of `ids` with negative ids for images, derived from the content of each image.

    The ids of an image's tokens, of the token before it and of the token after it are replaced,
    each by 31 bits of a hash over the image's digest and the ids that are replaced. The two
    neighbours are replaced too, so that at least two ids must collide before the embedding row of
    another image is reused.
    """
    known = np.array(ids)
    last = 0
    for i, span in enumerate(spans):
        first = max(span.start - 1, last)
        last = min(span.end + 1, spans[i + 1].start if i + 1 < len(spans) else len(ids))
        drawn = hashlib.shake_256(b"mlxcache image" + span.image.digest)
        drawn.update(ids[first:last].tobytes())
        words = np.frombuffer(drawn.digest(4 * (last - first)), dtype="<u4")
        known[first:last] = ~(words & 0x7FFFFFFF).astype(np.int32)
    return token_ids(known)


def _find_part(template: Template, token: str, args: Mapping[str, Any]) -> Message | None:
    for part in PARTS:
        content = [{"type": "text", "text": U}, part, {"type": "text", "text": U2}]
        if _shows(template, [message_of("user", content)], args, (U, token, U2)):
            return part
    return None


def _shows(
    template: Template, messages: list[Message], args: Mapping[str, Any], words: tuple[str, ...]
) -> bool:
    """Return whether rendered messages contain three words in this order, the second once."""
    try:
        text = template.render(messages, generation=True, args=args)
    except MlxcacheError:
        return False
    start, at, end = map(text.find, words)
    return 0 <= start < at < end and text.count(words[1]) == 1


def _shows_results(
    template: Template, token: str, part: Message, args: Mapping[str, Any], traits: Traits
) -> bool:
    if not traits.tool_role:
        return False
    *before, result = adapt(TOOL_TURN, (), traits)
    content = [{"type": "text", "text": R}, part, {"type": "text", "text": R2}]
    return _shows(template, [*before, {**result, "content": content}], args, (R, token, R2))
