"""Images, as mlx-lm serves them: its processor makes pixels, the model makes rows of them.

A row is what the model is fed at one position in place of a token's embedding.
"""

from __future__ import annotations

import io
import logging
from collections import OrderedDict
from collections.abc import Mapping
from importlib.util import find_spec
from threading import Lock
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.processors import load_processor
from mlx_lm.utils import does_model_support_input_embeddings

from mlxcache.errors import BadRequest
from mlxcache.types import Image, Tokens

log = logging.getLogger("mlxcache.model")

Pixels = npt.NDArray[np.float32]
"""What the processor makes of an image, shape (channels, height, width)."""

MAX_PIXELS = 40_000_000
"""Width times height of the largest image that is decoded."""

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
KEPT_TEXTS = 256
KEPT_BYTES = 64 << 20
MOST_TOKENS = 4096
"""Tokens of one image, at most, where a processor does not say."""


class Vision:
    """The image processor of a model, and its vision tower.

    `image_token` is the text of the token that a chat template writes for an image, and
    `token_id` its id; the processor repeats it, once for each row. `most_tokens`: rows of one image
    at most.
    """

    def __init__(self, model: Any, processor: Any, token_id: int):
        self.image_token: str = processor.image_token
        self.token_id = token_id
        self.most_tokens = int(getattr(processor, "max_num_image_tokens", MOST_TOKENS))
        self._model, self._processor = model, processor
        self._lock = Lock()
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._pixels: OrderedDict[bytes, Pixels] = OrderedDict()

    def text(self, image: Image) -> str:
        """What stands for an image in a prompt's text. In any thread.

        The digests of the latest images are remembered, so an image of the history is not decoded
        again. Raises BadRequest where it cannot be decoded.
        """
        with self._lock:  # one at a time: a decoded image may take hundreds of megabytes
            text = self._texts.get(image.digest)
            if text is None:
                text, _ = self._process(image)
            self._texts.move_to_end(image.digest)
            return text

    def pixels(self, image: Image) -> Pixels:
        """What the vision tower is given. In any thread. Raises as `text` does."""
        with self._lock:
            pixels = self._pixels.pop(image.digest, None)
            return self._process(image)[1] if pixels is None else pixels

    def rows(self, image: Image) -> mx.array:
        """The rows of an image, shape (tokens, hidden), evaluated. On the MLX thread."""
        pixels = mx.array(self.pixels(image))
        count = self.text(image).count(self.image_token)
        tokens = mx.full((count,), self.token_id, mx.int32)
        rows: mx.array = self._model.embed_inputs(tokens, pixel_values=[pixels])
        mx.eval(rows)
        return rows

    def embed(self, ids: Tokens) -> mx.array:
        """The rows of text, shape (n, hidden). On the MLX thread, lazy."""
        rows: mx.array = self._model.embed_inputs(mx.array(ids))
        return rows

    def sees(self, image: Image) -> bool:
        """Whether an image changes what the model is fed. On the MLX thread."""
        rows = self.rows(image)
        blind = self.embed(np.full(len(rows), self.token_id, np.int32))
        return not bool(mx.array_equal(rows, blind))

    def _process(self, image: Image) -> tuple[str, Pixels]:
        """The text and the pixels of an image, both remembered. The caller holds the lock."""
        rgb = decode(image.data)
        try:
            text, (values,) = self._processor(self.image_token, images=[rgb])
        except (AssertionError, ValueError) as error:
            raise BadRequest(f"The model takes no such image: {error}", param="messages") from error
        # made from numpy, so it is evaluated, and any thread may read it
        pixels = np.array(values)
        self._texts[image.digest], self._pixels[image.digest] = text, pixels
        while len(self._texts) > KEPT_TEXTS:
            self._texts.popitem(last=False)
        while len(self._pixels) > 1 and sum(p.nbytes for p in self._pixels.values()) > KEPT_BYTES:
            self._pixels.popitem(last=False)
        return text, pixels


def decode(data: bytes) -> npt.NDArray[np.uint8]:
    """An encoded picture's first frame as RGB, shape (height, width, 3).

    Raises BadRequest for what is no PNG, JPEG, GIF or WebP file, is damaged, or is larger than
    MAX_PIXELS, which its header tells before anything is decoded.
    """
    from PIL import Image as Pillow  # noqa: PLC0415 - an extra, which text models do without

    try:
        with Pillow.open(io.BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise BadRequest(
                    f"An image of {width} x {height} pixels is too large: "
                    f"at most {MAX_PIXELS:,} are taken.",
                    param="messages",
                )
            return np.asarray(picture.convert("RGB"))
    except (Pillow.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise BadRequest(
            "An image cannot be read: it must be a whole PNG, JPEG, GIF or WebP file.",
            param="messages",
        ) from error


def encode(pixels: npt.NDArray[np.uint8]) -> bytes:
    """RGB pixels, shape (height, width, 3), as a PNG file."""
    from PIL import Image as Pillow  # noqa: PLC0415 - as above

    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def load_vision(model: Any, tokenizer: Any, config: Mapping[str, Any]) -> Vision | None:
    """What mlx-lm has for the images of this model; None, and the log says why, if it has nothing
    or not all that is needed."""
    try:
        processor = load_processor(model, dict(config))
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        log.warning("the model's image processor cannot be made, text alone is served: %s", error)
        return None
    if processor is None:
        return None
    if find_spec("PIL") is None:
        log.warning(
            "the model takes images, and Pillow is not there to read them, so text alone is "
            "served: pip install 'mlxcache[vision]'"
        )
        return None
    if not (hasattr(model, "embed_inputs") and does_model_support_input_embeddings(model)):
        log.warning("mlx-lm cannot feed this model images: text alone is served")
        return None
    token_id = tokenizer.convert_tokens_to_ids(processor.image_token)
    if token_id is None or token_id == getattr(tokenizer, "unk_token_id", None):
        log.warning("the tokenizer has no %s: text alone is served", processor.image_token)
        return None
    return Vision(model, processor, int(token_id))
