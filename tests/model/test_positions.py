"""Positions of prompts with images are those that mlx-vlm's models compute themselves."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.model.vision import positions_of, shift_of
from mlxcache.types import Image, ImageSpan

SHOWN = Image(b"", bytes(32))
BEGIN, END, IMAGE, VIDEO = 1000, 1001, 1002, 1003
Part = int | tuple[int, int]
"""Tokens of text, or the rows and columns of an image."""

ARRANGEMENTS: dict[str, list[Part]] = {
    "text": [9],
    "image first": [(4, 5), 7],
    "image last": [7, (4, 5)],
    "one token": [3, (1, 1), 3],
    "high": [2, (9, 2), 5],
    "wide": [2, (2, 9), 5],
    "adjacent": [4, (2, 3), (3, 2), (1, 7), 4],
    "many": [5, (4, 4), 1, (2, 8), 30, (8, 2), 2, (3, 3), 11],
}


def spans_of(parts: list[Part]) -> tuple[list[int], list[ImageSpan]]:
    ids: list[int] = []
    spans: list[ImageSpan] = []
    for part in parts:
        if isinstance(part, int):
            ids += range(part)
            continue
        rows, columns = part
        start = len(ids) + 1
        spans.append(ImageSpan(start, start + rows * columns, SHOWN, part))
        ids += [BEGIN, *[IMAGE] * (rows * columns), END]
    return ids, spans


def test_an_image_is_one_time_and_a_grid() -> None:
    spans = [ImageSpan(2, 8, SHOWN, (2, 3))]
    found = positions_of(spans, 0, 10)
    assert found.dtype == np.int32
    assert found.T.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert shift_of(spans) == -3


def test_an_image_without_a_grid_is_like_text() -> None:
    spans = [ImageSpan(2, 8, SHOWN), ImageSpan(9, 10, SHOWN)]
    assert positions_of(spans, 1, 12).tolist() == [[i] * 3 for i in range(1, 12)]
    assert shift_of(spans) == 0


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_any_range_is_a_part_of_the_whole(name: str) -> None:
    ids, spans = spans_of(ARRANGEMENTS[name])
    whole = positions_of(spans, 0, len(ids) + 4)
    for start in range(len(ids) + 4):
        for end in range(start, len(ids) + 5):
            assert (positions_of(spans, start, end) == whole[start:end]).all()
    assert (whole[len(ids)] == len(ids) + shift_of(spans)).all()


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen4_exp"])
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_the_model_says_the_same(name: str, family: str) -> None:
    from importlib import import_module

    get_rope_index = import_module(f"mlx_vlm.models.{family}.language").LanguageModel.get_rope_index
    ids, spans = spans_of(ARRANGEMENTS[name])
    config = SimpleNamespace(
        vision_config=SimpleNamespace(spatial_merge_size=2),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
    )
    grids = [[1, 2 * span.grid[0], 2 * span.grid[1]] for span in spans if span.grid is not None]
    sides = mx.array(grids) if grids else None
    found, shift = get_rope_index(SimpleNamespace(config=config), mx.array([ids]), sides)
    own = np.array(found).reshape(-1, len(ids))  # one axis for all without images
    assert (own == positions_of(spans, 0, len(ids)).T).all()
    assert int(shift.item()) == shift_of(spans)
