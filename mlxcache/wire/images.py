"""Images as both APIs send them: in the body itself. None is fetched from anywhere."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.image import Image

MAX_IMAGES = 100
"""Images in one request."""

Item = str | Image
"""A part of a message's content."""


class Inlet:
    """Reads the images of one request. `served`: the model takes images at all.

    Every method takes `where`, a part's path in the body, for errors, and raises Unsupported for
    an image that is only referred to, BadRequest for one that is malformed or one too many.
    """

    def __init__(self, served: bool):
        self.served = served
        self._count = 0

    def url(self, url: Any, where: str) -> Image:
        """The image in a data: URL."""
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str):
            raise BadRequest(f"{where}: an image needs its URL, a string.", param=where)
        head, comma, data = url.partition(",")
        if not head.startswith("data:"):
            raise Unsupported(
                f"{where}: an image is not fetched by its URL: send it as a data: URL.", param=where
            )
        if not comma or not head.endswith(";base64"):
            raise BadRequest(f"{where}: the data: URL of an image must be base64.", param=where)
        return self.base64(data, where)

    def source(self, source: Any, where: str) -> Image:
        """The image in a `source` of Anthropic's."""
        source = source if isinstance(source, dict) else {}
        kind = source.get("type")
        if kind == "url":
            return self.url(source.get("url"), where)
        if kind != "base64":
            raise Unsupported(
                f"{where}: an image with a source of type {str(kind)[:64]!r} is not supported.",
                param=where,
            )
        return self.base64(source.get("data"), where)

    def base64(self, data: Any, where: str) -> Image:
        """The image that `data` encodes. Whether it can be read is found out when it is decoded."""
        self._count += 1
        if self._count > MAX_IMAGES:
            raise BadRequest(f"A request takes at most {MAX_IMAGES} images.", param=where)
        try:
            raw = base64.b64decode("".join(data.split()), validate=True)
        except (AttributeError, ValueError, binascii.Error):
            raw = b""
        if not raw:
            raise BadRequest(f"{where}: the image's data is not base64.", param=where)
        return Image(raw, hashlib.sha256(raw).digest())


def content(items: list[Item], between: str) -> str | list[Item]:
    """A message's content: a text where there is no image, `between` any two texts.

    Empty texts are left out.
    """
    found: list[Item] = []
    for item in items:
        if isinstance(item, str) and found and isinstance(found[-1], str):
            found[-1] = f"{found[-1]}{between}{item}" if item else found[-1]
        elif item:
            found.append(item)
    if any(isinstance(item, Image) for item in found):
        return found
    return "".join(item for item in found if isinstance(item, str))
