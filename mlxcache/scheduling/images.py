"""Images in prompts: the embeddings that replace their tokens, and their memory cost.

The vision tower processes each image as a whole, with the first chunk that needs the image. The
resulting embedding rows are kept until the last such chunk. MLX thread only.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxcache.model.vision import Rows, Vision, encode, positions_of
from mlxcache.scheduling.cost import SAFETY, peak
from mlxcache.scheduling.task import Task
from mlxcache.types import Image, ImageSpan, token_ids

SIDES = (224, 320, 448, 640, 896)
"""Side lengths, in pixels, of the images with which the vision tower is measured."""

MARGIN = 0.15  # amount added to the measured exponent of the memory's growth


@dataclass(frozen=True, slots=True)
class ImageCost:
    """Memory that images need, measured on the model, in bytes.

    The vision tower needs `peak` bytes for an image of `tokens` tokens, and n ** `growth` times
    that for n times as many. `row_bytes`: of the inputs that the model is fed for one token of an
    image. `pixel_bytes`: of an image's pixels for each of its tokens.
    """

    tokens: int
    peak: int
    growth: float
    row_bytes: int
    pixel_bytes: int

    def transient(self, tokens: int) -> int:
        times = tokens / self.tokens
        # what grows faster than by the number of tokens is, below a measured point, under a line
        return int(SAFETY * self.peak * times ** (self.growth if times > 1 else 1.0))

    def longest(self, room: int, most: int) -> int:
        """Return the tokens, at most `most`, of the largest image that fits into `room` bytes."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.transient(middle) <= room else (low, middle - 1)
        return low

    def kept(self, tokens: int, chunk: int) -> int:
        """Return the bytes to set aside for the embedding rows and pixels of one task's images."""
        return self.row_bytes * (2 * tokens + 2 * chunk) + self.pixel_bytes * tokens


def measure(vision: Vision, room: int) -> ImageCost | None:
    """Measure the memory that images need, with larger and larger ones as long as `room` allows.

    An image is tried only if 4 times the memory of the image before fits into `room` bytes. Returns
    None if the model's input embeddings for an image do not depend on its pixels.
    """
    noise = np.random.default_rng(0)
    points: list[tuple[int, int]] = []
    for side in SIDES:
        if points and 4 * points[-1][1] > room:
            break
        data = encode(noise.integers(0, 256, (side, side, 3), dtype=np.uint8))
        image = Image(data, hashlib.sha256(data).digest())
        tokens = vision.text(image).count(vision.image_token)
        points.append((tokens, peak(lambda image=image: vision.rows(image))))  # type: ignore[misc]
        mx.clear_cache()
    if not vision.sees(image):
        return None
    tokens, most = points[-1]
    growth = 2.0
    if len(points) == len(SIDES) and points[-2][0] < tokens:
        (fewer, less) = points[-2]
        growth = math.log(most / less) / math.log(tokens / fewer) + MARGIN
    row_bytes = sum(a.nbytes for a in vision.embed(token_ids([0])).values())
    pixel_bytes = vision.pixels(image).nbytes // tokens
    return ImageCost(tokens, most, min(max(growth, 1.0), 2.0), row_bytes, pixel_bytes)


class Images:
    """Embedding rows of the images of one task; memory is set aside for one task at a time.

    `largest`: tokens of the largest image for which that memory suffices.
    """

    def __init__(self, vision: Vision, cost: ImageCost, largest: int):
        self.vision = vision
        self.cost = cost
        self.largest = largest
        self._task: Task | None = None
        self._rows: dict[int, Rows] = {}

    def holder(self, tasks: Sequence[Task]) -> Task | None:
        """Return the task that is in the middle of an image, or it is computed again."""
        return self._task if self._task in tasks else None

    def inputs(self, task: Task, start: int, end: int) -> dict[str, mx.array]:
        """Return the model's extra keyword arguments for positions [start, end) of a task.

        The second axis of each array is the tokens. `positions` (see `model.positions`) is present
        if an image with a grid begins before `end`; `input_embeddings`, and other inputs that the
        model takes for images, if tokens of an image are in the range.
        """
        found: dict[str, mx.array] = {}
        if any(span.grid is not None and span.start < end for span in task.images):
            found["positions"] = mx.array(positions_of(task.images, start, end))[None]
        spans = [s for s in task.images if s.start < end and start < s.end]
        if self._task is not task:
            self._rows.clear()
        if not spans:
            self._task = None
            self._rows.clear()
            return found
        parts: list[Rows] = []
        at = start
        for span in spans:
            first, last = max(span.start, start), min(span.end, end)
            if at < first:
                parts.append(self.vision.embed(task.fed[at:first]))
            rows = self._span(span)
            parts.append(
                {name: a[first - span.start : last - span.start] for name, a in rows.items()}
            )
            at = last
        if at < end:
            parts.append(self.vision.embed(task.fed[at:end]))
        for name in parts[0]:
            found[name] = mx.concatenate([part[name] for part in parts])[None]
        mx.eval(list(found.values()))
        unfinished = spans[-1].end > end
        self._task = task if unfinished else None
        self._rows = {s.start: self._rows[s.start] for s in spans[-1:] if unfinished}
        return found

    def drop_rows(self) -> None:
        """Drop all embedding rows, which a failed device may have computed wrongly."""
        self._task = None
        self._rows.clear()

    def _span(self, span: ImageSpan) -> Rows:
        if span.start not in self._rows:
            self._rows[span.start] = self.vision.rows(span.image)
        return self._rows[span.start]
