"""Images in request bodies. They must be base64 in the body; no URL is fetched."""

from __future__ import annotations

import base64
import binascii
import hashlib
from itertools import groupby
from typing import Any

from mlxcache.errors import BadRequest
from mlxcache.types import Image
from mlxcache.wire.decode import unsupported, wrong

MAX_IMAGES = 100

Item = str | Image


class ImageReader:
    """Converter of one request's image parts to `Image`. `supported`: the model accepts images.

    `where` is the part's place in the body, for errors.
    """

    def __init__(self, supported: bool):
        self.supported = supported
        self._count = 0

    def read_url(self, url: Any, where: str) -> Image:
        """Return the image in a `data:` URL, which is a string or an object with `url`."""
        url = url.get("url") if isinstance(url, dict) else url
        if not isinstance(url, str):
            raise wrong(
                where,
                "an image needs a data: URL, as a string or as `url` of an object; "
                "the id of an uploaded file is not supported.",
            )
        head, comma, data = url.partition(",")
        if head[:5].lower() != "data:":
            raise unsupported(where, "an image is not fetched by its URL: send it as a data: URL.")
        if not comma or head[-7:].lower() != ";base64":
            raise wrong(where, "the data: URL of an image must be base64.")
        return self.read_base64(data, where)

    def read_source(self, source: Any, where: str) -> Image:
        """Return the image in a `source` object of Anthropic's API."""
        source = source if isinstance(source, dict) else {}
        kind = source.get("type")
        if kind is None:
            raise wrong(where, "an image needs a `source`, an object with `type` and `data`.")
        if kind == "url":
            return self.read_url(source.get("url"), where)
        if kind != "base64":
            raise unsupported(
                where, f"an image with a source of type {str(kind)[:64]!r} is not supported."
            )
        return self.read_base64(source.get("data"), where)

    def read_base64(self, data: Any, where: str) -> Image:
        """Return the image whose file is in the base64 text `data`, without checking its format."""
        self._count += 1
        if self._count > MAX_IMAGES:
            raise BadRequest(f"A request takes at most {MAX_IMAGES} images.", param=where)
        if data is None or data == "":
            raise wrong(where, "the image has no data.")
        try:
            raw = base64.b64decode("".join(data.split()), validate=True)
        except (AttributeError, ValueError, binascii.Error):
            raw = b""
        if not raw:
            raise wrong(where, "the image's data is not base64.")
        return Image(raw, hashlib.sha256(raw).digest(), where)


def join_items(items: list[Item], separator: str) -> str | list[Item]:
    """Join adjacent texts with `separator`, and drop empty ones. One text becomes a string."""
    found: list[Any] = []
    for is_image, run in groupby(filter(None, items), lambda item: isinstance(item, Image)):
        given = list(run)
        found += given if is_image else [separator.join(map(str, given))]
    if any(isinstance(item, Image) for item in found):
        return found
    return "".join(map(str, found))
