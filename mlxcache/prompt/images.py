"""Images in conversations: how a template is given them, and which ids stand for them.

A template writes one token for an image, which the model's image processor turns into as many as
the image has rows. Those are the same for any two images of one size, so the ids that a prompt is
known by are made from what the images show.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from mlxcache.errors import BadRequest, GenerationFailed, MlxcacheError
from mlxcache.prompt.template import Message, Template
from mlxcache.prompt.traits import U2, U
from mlxcache.types import Image, ImageSpan, Prompt, Tokens

log = logging.getLogger(__name__)

PARTS: tuple[Message, ...] = (
    {"type": "image_url", "image_url": {"url": "data:,"}},
    {"type": "image", "image": "data:,"},
)
"""The forms in which templates know an image, as a part of a message's content."""


class Pictures(Protocol):
    """What the model layer knows of images: see `model.vision.Vision`."""

    image_token: str
    token_id: int

    def text(self, image: Image) -> str: ...


class Album:
    """Images as one template takes them. Safe in any thread.

    `exists` tells whether it takes any: a template that writes none is found out here.
    """

    def __init__(self, template: Template, pictures: Pictures | None, args: Mapping[str, Any]):
        self._pictures = pictures
        self._part = _part(template, pictures.image_token, args) if pictures else None
        if pictures is not None and self._part is None:
            log.warning("the model's chat template writes no images: text alone is served")

    @property
    def exists(self) -> bool:
        """Whether images can be rendered at all."""
        return self._part is not None

    def shown(self, messages: Sequence[Message]) -> tuple[list[Message], list[Image]]:
        """The messages as the template takes them, and their images in order.

        Raises BadRequest where there are images and the template takes none.
        """
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
        for item in content:
            if isinstance(item, Image):
                parts.append(self._part)
            elif parts and parts[-1]["type"] == "text":
                parts[-1] = {"type": "text", "text": parts[-1]["text"] + item}
            elif item:
                parts.append({"type": "text", "text": item})
        return parts

    def written_out(self, text: str, images: Sequence[Image]) -> str:
        """A rendered text with each image's one token replaced by all that stands for it.

        Raises BadRequest where the template has left an image out, or an image cannot be read.
        """
        if not images:
            return text
        assert self._pictures is not None
        pieces = text.split(self._pictures.image_token)
        if len(pieces) != len(images) + 1:
            raise BadRequest(
                "the model's chat template has no place for an image there", param="messages"
            )
        written = [pieces[0]]
        for image, piece in zip(images, pieces[1:], strict=True):
            written += [self._pictures.text(image), piece]
        return "".join(written)

    def place(self, ids: Tokens, images: Sequence[Image]) -> tuple[Tokens, tuple[ImageSpan, ...]]:
        """The ids that the cache knows a prompt by, and where its images are.

        Raises GenerationFailed where the tokens are not where the images should be.
        """
        assert self._pictures is not None
        at = np.flatnonzero(ids == self._pictures.token_id)
        spans: list[ImageSpan] = []
        done = 0
        for image in images:
            count = self._pictures.text(image).count(self._pictures.image_token)
            own = at[done : done + count]
            if not count or len(own) < count or own[-1] - own[0] != count - 1:
                raise GenerationFailed("the tokens of an image are not where they should be")
            spans.append(ImageSpan(int(own[0]), int(own[-1]) + 1, image))
            done += count
        if done != len(at) or (spans and spans[-1].end == len(ids)):
            raise GenerationFailed("the tokens of an image are where none should be")
        return known_by(ids, spans), tuple(spans)


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[Image]:
    """The images of a conversation, in order."""
    return [
        part
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, Image)
    ]


def known_by(ids: Tokens, spans: Sequence[ImageSpan]) -> Tokens:
    """A copy of `ids` in which an image's are less than 0 and stand for what it shows.

    Each is 31 bits drawn from the image's digest and the ids themselves, also those of the tokens
    before and behind it, whose rows do not depend on the image: so two ids at least must
    coincide before a wrong row would be reused.
    """
    known = ids.copy()
    last = 0
    for i, span in enumerate(spans):
        first = max(span.start - 1, last)
        last = min(span.end + 1, spans[i + 1].start if i + 1 < len(spans) else len(ids))
        drawn = hashlib.shake_256(b"mlxcache image" + span.image.digest)
        drawn.update(ids[first:last].astype("<i4").tobytes())
        words = np.frombuffer(drawn.digest(4 * (last - first)), dtype="<u4")
        known[first:last] = ~(words & 0x7FFFFFFF).astype(np.int32)
    return known


def with_images(prompt: Prompt, album: Album, images: Sequence[Image]) -> Prompt:
    """A prompt whose ids stand for what its images show."""
    known, spans = album.place(prompt.ids, images)
    return replace(prompt, ids=known, tokens=prompt.ids, images=spans)


def _part(template: Template, token: str, args: Mapping[str, Any]) -> Message | None:
    """The form of an image that comes out of the template as `token`, in its place."""
    for part in PARTS:
        content = [{"type": "text", "text": U}, part, {"type": "text", "text": U2}]
        try:
            text = template.render([_user(content)], generation=True, args=args)
        except MlxcacheError:
            continue
        start, at, end = (text.find(word) for word in (U, token, U2))
        if 0 <= start < at < end and text.count(token) == 1:
            return part
    return None


def _user(content: Any) -> Message:
    return {"role": "user", "content": content}
