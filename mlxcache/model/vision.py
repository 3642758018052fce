"""Images for models that take them: a processor makes pixels, the model makes embeddings.

An image becomes several vectors, each fed to the model at one position in place of a token's
embedding. They are called the *rows* of the image.
"""

from __future__ import annotations

import io
import logging
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from threading import Lock
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.processors import load_processor
from mlx_lm.utils import does_model_support_input_embeddings

from mlxcache.errors import BadRequest
from mlxcache.types import Image, ImageSpan, Tokens, token_ids

log = logging.getLogger("mlxcache.model")

Pixels = npt.NDArray[np.float32]
"""An image as its processor returns it, in the shape that the vision tower takes."""

Rows = Mapping[str, mx.array]
"""Inputs of the model at some tokens, by the model's argument; their first axis is the tokens."""

Grid = tuple[int, int]
"""Numbers of rows and columns in which the tokens of an image lie."""

MAX_PIXELS = 40_000_000
MAX_SIDE = 32_768  # resizing an image needs memory for its height times the new width

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
ANIMATED = ("PNG", "GIF", "WEBP")  # whose second frame is one of an animation

KEPT_IMAGES = 256
KEPT_BYTES = 64 << 20
MOST_TOKENS = 4096  # per image, if the processor states none


@dataclass(frozen=True, slots=True)
class Processed:
    """An image as its processor returns it, and the `text` that stands for it in a prompt.

    `grid`: None if the positions of its tokens are consecutive, as those of text are.
    """

    text: str
    pixels: Pixels
    grid: Grid | None = None


class ImageModel(Protocol):
    """The image processor and vision tower of a model family.

    `image_token`: the text of the token that a chat template writes for an image, once for each
    position that it takes, at most `most_tokens`. `count` returns the positions of an image, or
    None if only processing tells. `process` takes RGB pixels, shape (height, width, 3), on any
    thread. Both raise ValueError for an image that they refuse. `rows` returns the model's inputs
    at the tokens of an image, `embed` at tokens of text. Both are lazy; MLX thread only.
    """

    image_token: str
    token_id: int
    most_tokens: int

    def count(self, height: int, width: int) -> int | None: ...

    def process(self, rgb: npt.NDArray[np.uint8]) -> Processed: ...

    def rows(self, ids: Tokens, pixels: Pixels, grid: Grid | None) -> Rows: ...

    def embed(self, ids: Tokens) -> Rows: ...


class Vision:
    """Images of a model: what stands for them in prompts, and what is fed in their places.

    What the processor returned for recent images is kept by digest. `largest`: the most tokens that
    one image may take, as memory allows. Methods that take an image decode it if needed, on any
    thread, and raise BadRequest if it is refused.
    """

    def __init__(self, model: ImageModel, largest: int | None = None):
        self.image_token = model.image_token
        self.token_id = model.token_id
        self.most_tokens = model.most_tokens
        self._model = model
        self._largest = largest
        self._lock = Lock()
        self._shown: OrderedDict[bytes, tuple[str, Grid | None]] = OrderedDict()
        self._pixels: OrderedDict[bytes, Pixels] = OrderedDict()

    def limited(self, largest: int) -> Vision:
        return Vision(self._model, largest)

    def text(self, image: Image) -> str:
        """Return the text that stands for an image in a prompt."""
        return self._show(image)[0]

    def grid(self, image: Image) -> Grid | None:
        return self._show(image)[1]

    def _show(self, image: Image) -> tuple[str, Grid | None]:
        with self._lock:  # one at a time: a decoded image may take hundreds of megabytes
            if image.digest not in self._shown:
                self._process(image)
            self._shown.move_to_end(image.digest)
            return self._shown[image.digest]

    def pixels(self, image: Image) -> Pixels:
        with self._lock:
            pixels = self._pixels.pop(image.digest, None)
            return self._process(image) if pixels is None else pixels

    def rows(self, image: Image) -> Rows:
        """Compute and evaluate the model's inputs at the tokens of an image. MLX thread only."""
        pixels, (text, grid) = self.pixels(image), self._show(image)
        ids = token_ids([self.token_id] * text.count(self.image_token))
        rows = self._model.rows(ids, pixels, grid)
        mx.eval(list(rows.values()))
        return rows

    def embed(self, ids: Tokens) -> Rows:
        """Return the model's inputs at tokens of text, lazily. MLX thread only."""
        return self._model.embed(ids)

    def sees(self, image: Image) -> bool:
        """Return whether the embeddings of an image depend on its pixels. MLX thread only."""
        rows = self.rows(image)["input_embeddings"]
        blind = self.embed(token_ids([self.token_id] * len(rows)))["input_embeddings"]
        return not bool(mx.array_equal(rows, blind))

    def _process(self, image: Image) -> Pixels:
        rgb = decode(image.data)
        try:
            self._check(self._model.count(*rgb.shape[:2]))
            made = self._model.process(rgb)
        except (AssertionError, ValueError) as error:
            raise BadRequest(
                f"The model does not accept this image: {error}", param="messages"
            ) from error
        self._shown[image.digest] = made.text, made.grid
        self._pixels[image.digest] = made.pixels
        while len(self._shown) > KEPT_IMAGES:
            self._shown.popitem(last=False)
        while len(self._pixels) > 1 and sum(p.nbytes for p in self._pixels.values()) > KEPT_BYTES:
            self._pixels.popitem(last=False)
        return made.pixels

    def _check(self, count: int | None) -> None:
        if self._largest is not None and count is not None and count > self._largest:
            raise too_large(count, self._largest)


def too_large(count: int, largest: int) -> BadRequest:
    return BadRequest(
        f"An image of {count} tokens is too large: the memory budget (--ram) has room for one of "
        f"{largest}.",
        param="messages",
    )


class MlxLmImages:
    def __init__(self, model: Any, processor: Any, token_id: int):
        self.image_token: str = processor.image_token
        self.token_id = token_id
        self.most_tokens = int(getattr(processor, "max_num_image_tokens", MOST_TOKENS))
        self._model, self._processor = model, processor

    def count(self, height: int, width: int) -> int | None:
        return None

    def process(self, rgb: npt.NDArray[np.uint8]) -> Processed:
        text, (values,) = self._processor(self.image_token, images=[rgb])
        return Processed(text, np.array(values))  # a NumPy array, which any thread may read

    def rows(self, ids: Tokens, pixels: Pixels, grid: Grid | None) -> Rows:
        found = self._model.embed_inputs(mx.array(ids), pixel_values=[mx.array(pixels)])
        return {"input_embeddings": found}

    def embed(self, ids: Tokens) -> Rows:
        return {"input_embeddings": self._model.embed_inputs(mx.array(ids))}


def decode(data: bytes) -> npt.NDArray[np.uint8]:
    """Decode a still image file to RGB, shape (height, width, 3), upright by its EXIF orientation.

    Accepts PNG, JPEG, GIF and WebP. Transparent parts become white. Raises BadRequest for any
    other, damaged, animated or too large file, the last before anything is decoded.
    """
    from PIL import Image as Pillow  # noqa: PLC0415 - an extra, which text models do without
    from PIL import ImageOps  # noqa: PLC0415 - as above

    try:
        with Pillow.open(io.BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
                raise BadRequest(
                    f"An image of {width} x {height} pixels is too large: at most "
                    f"{MAX_PIXELS:,} and {MAX_SIDE:,} a side are accepted.",
                    param="messages",
                )
            # a photo may have a second picture, such as its depth, which is no animation
            if picture.format in ANIMATED and getattr(picture, "is_animated", False):
                raise BadRequest(
                    "An animated image is not accepted: send a single frame of it.",
                    param="messages",
                )
            picture.load()
            with suppress(OSError, SyntaxError, ValueError, LookupError, TypeError, struct.error):
                ImageOps.exif_transpose(picture, in_place=True)  # a damaged EXIF turns nothing
            return _opaque(picture)
    except (Pillow.DecompressionBombError, OSError, SyntaxError, ValueError) as error:
        raise BadRequest(
            "An image cannot be read: it must be a complete PNG, JPEG, GIF or WebP file.",
            param="messages",
        ) from error


def _opaque(picture: Any) -> npt.NDArray[np.uint8]:
    from PIL import Image as Pillow  # noqa: PLC0415 - as above

    if picture.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
        high = (np.asarray(picture) >> 8).astype(np.uint8)
        return np.repeat(high[:, :, None], 3, axis=2)
    if not picture.has_transparency_data:
        return np.asarray(picture.convert("RGB"))
    white = Pillow.new("RGBA", picture.size, "white")
    white.alpha_composite(picture.convert("RGBA"))
    return np.asarray(white.convert("RGB"))


def encode(pixels: npt.NDArray[np.uint8]) -> bytes:
    from PIL import Image as Pillow  # noqa: PLC0415 - as above

    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def load_vision(
    model: Any, tokenizer: Any, config: Mapping[str, Any], *, label: str
) -> Vision | None:
    """Make the image processor of a model of mlx-lm; None if it cannot take images here."""
    kind = config.get("model_type")
    try:
        processor = load_processor(model, dict(config))
        if processor is None:
            return None
        if find_spec("PIL") is None:
            raise ValueError("Pillow is not installed: pip install 'mlxcache[vision]'")
        if not (hasattr(model, "embed_inputs") and does_model_support_input_embeddings(model)):
            raise ValueError(f"mlx-lm cannot feed images to model type {kind}")
        token_id = tokenizer.convert_tokens_to_ids(processor.image_token)
        if token_id is None or token_id == getattr(tokenizer, "unk_token_id", None):
            raise ValueError(f"the tokenizer has no token {processor.image_token}")
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        log.warning("model %s: images disabled: model type %s: %s", label, kind, error)
        return None
    return Vision(MlxLmImages(model, processor, int(token_id)))


# -- positions -------------------------------------------------------------------------------------


def shift_of(spans: Sequence[ImageSpan]) -> int:
    """Return the position of a token of text behind images, minus the tokens before it."""
    return sum(max(span.grid) - (span.end - span.start) for span in spans if span.grid is not None)


def positions_of(spans: Sequence[ImageSpan], start: int, end: int) -> npt.NDArray[np.int32]:
    """Return the positions of the tokens [start, end) of a prompt, shape (end - start, 3).

    A token of text has the same position on all three axes. All tokens of an image have one time,
    and rows and columns by their places in its grid. The text behind it goes on after the largest
    position in it:

        token       a  b  [ image: 2 rows, 3 columns ]  c  d
        time        0  1   2  2  2  2  2  2             5  6
        row         0  1   2  2  2  3  3  3             5  6
        column      0  1   2  3  4  2  3  4             5  6
    """
    found = np.repeat(np.arange(start, end, dtype=np.int32)[:, None], 3, axis=1)
    shift = 0
    for span in spans:
        if span.grid is None:
            continue
        first, last = (min(max(at, start), end) - start for at in (span.start, span.end))
        places = np.arange(first, last, dtype=np.int32) + (start - span.start)
        rows, columns = np.divmod(places, span.grid[1])
        axes = [np.zeros_like(rows), rows, columns]
        found[first:last] = span.start + shift + np.stack(axes, axis=1)
        more = shift_of([span])
        found[last:] += more
        shift += more
    return found
