"""Images in request bodies. They must be base64 in the body; no URL is fetched."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.types import Image

MAX_IMAGES = 100
"""Maximum images in one request."""

Item = str | Image
"""A part of a message's content: text or an image."""


class ImageReader:
    """Converter of one request's image parts to `Image`.

    `supported` tells whether the model accepts images. Methods take `where`, the part's place in
    the body, for errors. They raise Unsupported for an image given by a URL to fetch or by a source
    of an unknown type, and BadRequest for a missing or malformed image or more than `MAX_IMAGES`
    images.
    """

    def __init__(self, supported: bool):
        self.supported = supported
        self._count = 0

    def read_url(self, url: Any, where: str) -> Image:
        """Return the image in a `data:` URL, which is a string or an object with `url`.

        `where` is the image's place in the body, for errors.
        """
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str):
            raise BadRequest(
                f"{where}: an image needs a data: URL, as a string or as `url` of an object; "
                "the id of an uploaded file is not supported.",
                param=where,
            )
        head, comma, data = url.partition(",")
        if head[:5].lower() != "data:":
            raise Unsupported(
                f"{where}: an image is not fetched by its URL: send it as a data: URL.", param=where
            )
        if not comma or head[-7:].lower() != ";base64":
            raise BadRequest(f"{where}: the data: URL of an image must be base64.", param=where)
        return self.read_base64(data, where)

    def read_source(self, source: Any, where: str) -> Image:
        """Return the image in a `source` object of Anthropic's API.

        `where` is the object's place in the body, for errors.
        """
        source = source if isinstance(source, dict) else {}
        kind = source.get("type")
        if kind is None:
            raise BadRequest(
                f"{where}: an image needs a `source`, an object with `type` and `data`.",
                param=where,
            )
        if kind == "url":
            return self.read_url(source.get("url"), where)
        if kind != "base64":
            raise Unsupported(
                f"{where}: an image with a source of type {str(kind)[:64]!r} is not supported.",
                param=where,
            )
        return self.read_base64(source.get("data"), where)

    def read_base64(self, data: Any, where: str) -> Image:
        """Return the image whose file is in the base64 text `data`, without checking its format.

        `where` is the image's place in the body, for errors.
        """
        self._count += 1
        if self._count > MAX_IMAGES:
            raise BadRequest(f"A request takes at most {MAX_IMAGES} images.", param=where)
        if data is None or data == "":
            raise BadRequest(f"{where}: the image has no data.", param=where)
        try:
            raw = base64.b64decode("".join(data.split()), validate=True)
        except (AttributeError, ValueError, binascii.Error):
            raw = b""
        if not raw:
            raise BadRequest(f"{where}: the image's data is not base64.", param=where)
        return Image(raw, hashlib.sha256(raw).digest(), where)


def join_items(items: list[Item], separator: str) -> str | list[Item]:
    """Join adjacent texts with `separator` and drop empty ones.

    Returns one string if there are no images, else a list of texts and images.
    """
    found: list[Item] = []
    for item in items:
        if isinstance(item, str) and found and isinstance(found[-1], str):
            found[-1] = f"{found[-1]}{separator}{item}" if item else found[-1]
        elif item:
            found.append(item)
    if any(isinstance(item, Image) for item in found):
        return found
    return "".join(item for item in found if isinstance(item, str))
