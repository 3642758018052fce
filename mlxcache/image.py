"""Images on their way from a body to the model: frozen values, like those of `types`."""

from __future__ import annotations

from dataclasses import dataclass, field


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
