"""Image processors of models that mlx-vlm runs: sizes, order of tokens, settings, refusals.

Skipped where mlx-vlm is not installed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.errors import BadRequest
from mlxcache.model.examine import examine
from mlxcache.model.fingerprint import fingerprint
from mlxcache.model.load import Loaded, ModelSpec, load
from mlxcache.model.vision import Vision, encode
from mlxcache.model.weights import Weights
from mlxcache.types import Image
from tests.conftest import ToyMaker
from tests.toys.images import SIDE, screenshot

FEWEST, MOST = 4, 1024
"""Tokens of an image, by the toy's settings."""


@pytest.fixture(scope="module")
def source(toy: ToyMaker) -> Path:
    return toy("qwen3_vl", images=True, layers=2)


@pytest.fixture(scope="module")
def loaded(source: Path) -> Loaded:
    return load(ModelSpec(str(source)))


@pytest.fixture
def vision(loaded: Loaded) -> Vision:
    assert loaded.vision is not None
    return loaded.vision


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    copied: Path = shutil.copytree(source, tmp_path / "model")
    return copied


def shown(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> Image:
    data = encode(pixels)
    return Image(data, hashlib.sha256(data).digest())


def blank(width: int, height: int) -> Image:
    return shown(np.full((height, width, 3), 90, np.uint8))


@pytest.mark.parametrize(
    "size", [(64, 64), (65, 97), (1, 1), (10, 30), (1000, 40), (40, 1000), (3000, 2000), (17, 900)]
)
def test_any_size_is_resized_to_whole_tokens_within_limits(
    vision: Vision, size: tuple[int, int]
) -> None:
    image = blank(*size)
    grid = vision.grid(image)
    assert grid is not None
    rows, columns = grid
    assert FEWEST <= rows * columns <= MOST
    assert vision.text(image) == "<|image_pad|>" * (rows * columns)
    assert vision.rows(image)["input_embeddings"].shape[0] == rows * columns
    width, height = size
    if FEWEST * SIDE**2 <= width * height <= MOST * SIDE**2:
        assert grid == (max(1, round(height / SIDE)), max(1, round(width / SIDE)))


def test_tokens_lie_row_by_row(vision: Vision) -> None:
    """Each is made of the pixels at its place; the positions rely on that."""
    rows, columns = 3, 4
    grey = np.arange(rows * columns, dtype=np.uint8).reshape(rows, columns) * 20
    pixels = grey.repeat(SIDE, axis=0).repeat(SIDE, axis=1)[..., None].repeat(3, axis=2)
    made = vision.pixels(shown(pixels)).reshape(rows * columns, -1)
    assert np.ptp(made, axis=1).max() == 0
    values = np.rint((made[:, 0] * 0.5 + 0.5) * 255)
    assert values.tolist() == grey.reshape(-1).tolist()


def test_a_long_strip_is_refused(vision: Vision) -> None:
    with pytest.raises(BadRequest, match=r"does not accept this image: .*aspect ratio"):
        vision.text(blank(6000, 20))


def test_what_has_no_memory_is_refused_before_it_is_resized(vision: Vision) -> None:
    small = vision.limited(20)
    assert small.grid(screenshot(1, 5, 4)) == (4, 5)
    with pytest.raises(BadRequest, match=r"An image of 24 tokens is too large: .* one of 20"):
        small.text(screenshot(1, 6, 4))
    assert small._pixels.keys() == {screenshot(1, 5, 4).digest}


def test_an_unloaded_model_sees_the_same_again(folder: Path) -> None:
    spec = ModelSpec(str(folder))
    loaded = load(spec)
    weights = Weights(loaded, spec)
    assert loaded.vision is not None
    before = loaded.vision.rows(screenshot(1))
    weights.drop()
    assert sum(weights.read()) > 0
    after = loaded.vision.rows(screenshot(1))
    assert before.keys() == after.keys() == {"input_embeddings", "deepstack"}
    assert all(mx.array_equal(before[name], after[name]) for name in before)


def edit(folder: Path, name: str, **changes: object) -> None:
    file = folder / name
    fields = json.loads(file.read_text()) if file.exists() else {}
    kept = {key: value for key, value in (fields | changes).items() if value is not None}
    file.write_text(json.dumps(kept))


def test_settings_may_be_in_either_file_and_under_older_names(folder: Path) -> None:
    def grid() -> Any:
        vision = load(ModelSpec(str(folder))).vision
        assert vision is not None
        return vision.grid(blank(640, 320))

    assert grid() == (10, 20)
    edit(folder, "preprocessor_config.json", size=None, min_pixels=4096, max_pixels=50 * SIDE**2)
    assert grid() == (5, 10)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    settings["max_pixels"] = 128 * SIDE**2
    edit(folder, "processor_config.json", image_processor=settings, processor_class="any")
    assert grid() == (8, 16)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"patch_size": 14}, "patch_size is 14 in preprocessor_config.json, but 16 in config.json"),
        ({"merge_size": None}, "merge_size"),
        ({"size": {}}, "shortest_edge"),
        ({"size": "large"}, "TypeError"),
    ],
)
def test_settings_that_do_not_fit_leave_a_text_model(
    folder: Path, changes: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    edit(folder, "preprocessor_config.json", **changes)
    assert load(ModelSpec(str(folder))).vision is None
    assert "images disabled" in caplog.text
    assert said in caplog.text


def test_what_needs_mlx_lm_is_served_without_images(folder: Path) -> None:
    loaded = load(ModelSpec(str(folder), images=False))
    assert loaded.info.backend == "mlx-lm"
    assert loaded.vision is None
    assert str(loaded.unseen).startswith("mlx-vlm is not used with")


def test_quantised_kv_is_possible_without_images(folder: Path) -> None:
    found = examine(ModelSpec(str(folder)))
    assert found.info.backend == "mlx-vlm"
    assert found.info.has_images
    assert found.unquantised is None
    assert found.unseen is None


def test_other_settings_and_another_library_are_another_namespace(folder: Path) -> None:
    def of(backend: str) -> str:
        memo = folder.parent / "memo.json"
        return fingerprint(
            folder, adapter=None, memo=memo, layout_key="", kv_format=1, backend=backend
        )

    text, images = of("mlx-lm"), of("mlx-vlm")
    assert text != images
    edit(folder, "preprocessor_config.json", max_pixels=50 * SIDE**2)
    assert of("mlx-lm") == text
    assert of("mlx-vlm") != images
