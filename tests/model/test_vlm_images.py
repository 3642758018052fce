"""Prompts with images, in any chunks, give the logits of one pass of mlx-vlm's own model.

Skipped where mlx-vlm is not installed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.model import kv
from mlxcache.model.lineage import Lineage
from mlxcache.model.load import Loaded, ModelSpec, load
from mlxcache.model.vision import shift_of
from mlxcache.prompt.images import ids_with_digests
from mlxcache.scheduling.images import Images, measure
from mlxcache.types import ImageSpan, Tokens, join_ids, token_ids
from tests.conftest import ToyMaker
from tests.model.seeing import Whole, poison
from tests.toys.images import screenshot
from tests.toys.vlm import SEEING

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
TOLERANCE = 1e-4
NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
"""Ends of the names of norms that Qwen3.5 stores less one."""


@pytest.fixture(
    scope="module",
    params=[n if n != "qwen4_exp" else pytest.param(n, marks=pytest.mark.slow) for n in SEEING],
)
def loaded(request: pytest.FixtureRequest, toy: ToyMaker) -> Loaded:
    return load(ModelSpec(str(toy(request.param, images=True, layers=2))))


@pytest.fixture(scope="module")
def whole(loaded: Loaded) -> Whole:
    return Whole(loaded.path)


class Talk:
    """A prompt with images, as a task of the engine has it. `parts`: text's tokens, or images."""

    def __init__(self, loaded: Loaded, *parts: int | tuple[int, int, int]):
        assert loaded.vision is not None
        config, noise = loaded.config, np.random.default_rng(len(parts))
        ids: list[int] = []
        spans: list[ImageSpan] = []
        for part in parts:
            if isinstance(part, int):
                ids += [int(one) for one in noise.integers(10, 400, part)]
                continue
            shown = screenshot(*part)
            grid = loaded.vision.grid(shown)
            assert grid is not None
            start = len(ids) + 1
            count = grid[0] * grid[1]
            spans.append(ImageSpan(start, start + count, shown, grid))
            ids += [config["vision_start_token_id"], *[config["image_token_id"]] * count]
            ids += [config["vision_end_token_id"]]
        self.fed: Tokens = token_ids(ids)
        self.images = tuple(spans)

    def __len__(self) -> int:
        return len(self.fed)


class Feeder:
    def __init__(self, loaded: Loaded):
        assert loaded.vision is not None
        cost = measure(loaded.vision, 1 << 22)
        assert cost is not None
        self.loaded, self.images = loaded, Images(loaded.vision, cost, 1024)
        self.layout = kv.survey(loaded.model)

    def start(self) -> Lineage:
        line = Lineage(self.layout)
        line.grow(512)
        return line

    def feed(self, line: Lineage, talk: Talk, end: int) -> mx.array:
        """Feed the prompt up to `end`; return the logits at each token fed, shape (n, V)."""
        start = line.length
        inputs = self.images.inputs(talk, start, end)  # type: ignore[arg-type]
        return self._call(line, talk.fed[start:end], inputs)

    def decode(self, line: Lineage, talk: Talk, tokens: list[int]) -> mx.array:
        shift = mx.array([shift_of(talk.images)])
        return self._call(line, token_ids(tokens), {"shift": shift})

    def _call(self, line: Lineage, ids: Tokens, inputs: dict[str, mx.array]) -> mx.array:
        assert poison(self.loaded.model)
        logits: mx.array = self.loaded.model(mx.array(ids)[None], cache=line.caches, **inputs)[0]
        mx.eval(logits)
        kv.eval_states(line.caches)
        line.advance(len(ids))
        assert line.aligned()
        return logits


def difference(one: mx.array, other: mx.array) -> float:
    return float(mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max())


@pytest.fixture(scope="module")
def feeder(loaded: Loaded) -> Feeder:
    return Feeder(loaded)


def test_it_is_run_by_mlx_vlm_with_its_images(loaded: Loaded) -> None:
    from mlx_vlm.models.cache import make_prompt_cache

    assert loaded.info.backend == "mlx-vlm"
    raw = make_prompt_cache(loaded.model.language_model)
    classes = ", ".join(dict.fromkeys(f"`{type(cache).__name__}`" for cache in raw))
    batches = "yes" if kv.survey(loaded.model).batchable else "no"
    row = f"| `{loaded.info.architecture}` | mlx-vlm | {classes} | {batches} |"
    assert row in PAGE.read_text(encoding="utf-8").splitlines()
    assert loaded.vision is not None
    assert loaded.vision.grid(screenshot(1, 5, 4)) == (4, 5)


@pytest.mark.parametrize("size", [1, 7, 16, 1000])
def test_any_chunks_give_the_logits_of_the_whole(
    loaded: Loaded, whole: Whole, feeder: Feeder, size: int
) -> None:
    talk = Talk(loaded, (1, 5, 4), 9, (2, 2, 7), (3, 6, 2), 12)
    expected = whole.logits(talk.fed, talk.images)
    line = feeder.start()
    while line.length < len(talk):
        at = line.length
        made = feeder.feed(line, talk, min(at + size, len(talk)))
        assert difference(made, expected[at : line.length]) < TOLERANCE


def test_a_prompt_may_be_cut_at_every_token(loaded: Loaded, whole: Whole, feeder: Feeder) -> None:
    """Inside images too: KV from before the cut, rows from behind it."""
    talk = Talk(loaded, 5, (1, 5, 4), 4, (2, 3, 3), 6)
    expected = whole.logits(talk.fed, talk.images)
    for cut in range(1, len(talk)):
        line = feeder.start()
        feeder.feed(line, talk, cut)
        feeder.images.drop_rows()
        made = feeder.feed(line, talk, len(talk))
        assert difference(made, expected[cut:]) < TOLERANCE


def test_a_reply_goes_on_behind_images(loaded: Loaded, whole: Whole, feeder: Feeder) -> None:
    talks = [Talk(loaded, 5, (1, 5, 4), 4), Talk(loaded, (2, 2, 9), 3, (3, 2, 2), 7)]
    replies = [[20, 30, 40, 50, 60, 70], [21, 31, 41, 51, 61, 71]]
    lines = [feeder.start() for _ in talks]
    expected = [
        whole.logits(join_ids(talk.fed, token_ids(reply)), talk.images)
        for talk, reply in zip(talks, replies, strict=True)
    ]
    for end in (12, 25, 26, 1000):
        for line, talk in zip(lines, talks, strict=True):
            feeder.feed(line, talk, min(end, len(talk)))
    for start, end in ((0, 1), (1, 2), (2, 5), (5, 6)):
        for i, (line, talk) in enumerate(zip(lines, talks, strict=True)):
            made = feeder.decode(line, talk, replies[i][start:end])
            at = len(talk) + start
            assert difference(made, expected[i][at : at + end - start]) < TOLERANCE


def test_text_alone_is_as_without_images(loaded: Loaded, whole: Whole, feeder: Feeder) -> None:
    talk = Talk(loaded, 40)
    line = feeder.start()
    made = mx.concatenate([feeder.feed(line, talk, end) for end in (13, 14, 40)])
    assert difference(made, whole.logits(talk.fed)) < TOLERANCE


def test_what_an_image_shows_changes_the_logits(loaded: Loaded, feeder: Feeder) -> None:
    """So do its shape and its place: the tests above can fail."""
    made = []
    for shown in ((1, 4, 6), (2, 4, 6), (1, 6, 4)):
        talk = Talk(loaded, 5, shown, 9)
        made.append(feeder.feed(feeder.start(), talk, len(talk))[-1])
    assert difference(made[0], made[1]) > 100 * TOLERANCE
    assert difference(made[0], made[2]) > 100 * TOLERANCE
    talk = Talk(loaded, 5, (1, 4, 6), 9)
    line = feeder.start()
    feeder.feed(line, talk, len(talk))
    unmoved = SimpleNamespace(images=())
    right = feeder.decode(line, talk, [20])
    line.truncate(len(talk)) if not feeder.layout.opaque else None
    line = feeder.start()
    feeder.feed(line, talk, len(talk))
    wrong: Any = feeder.decode(line, unmoved, [20])  # type: ignore[arg-type]
    assert difference(right, wrong) > 10 * TOLERANCE
    assert (ids_with_digests(talk.fed, talk.images)[6:30] < 0).all()


def as_published(name: str, value: mx.array, family: str) -> tuple[str, mx.array]:
    """A weight with PyTorch's name and order of axes."""
    if name.endswith("patch_embed.proj.weight"):
        value = value.transpose(0, 4, 1, 2, 3)
    elif name.endswith("conv1d.weight"):
        value = value.moveaxis(2, 1)
    elif family == "qwen3_5" and name.startswith("language_model.") and name.endswith(NORMS):
        value -= 1.0
    name = name.replace("language_model.lm_head", "lm_head")
    name = name.replace("language_model.model.", "model.language_model.")
    return name.replace("vision_tower.", "model.visual."), mx.contiguous(value)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5"])
def test_files_as_their_makers_publish_them_are_read(
    toy: ToyMaker, tmp_path: Path, family: str
) -> None:
    """In the form of transformers, whose norms may be stored less one."""
    source = toy(family, images=True, layers=2)
    path = shutil.copytree(source, tmp_path / "model")
    weights = mx.load(str(source / "model.safetensors"))
    assert isinstance(weights, dict)
    published = dict(as_published(name, value, family) for name, value in weights.items())
    file = path / "model.safetensors"
    mx.save_safetensors(str(file), published, metadata={"format": "pt"})
    made = []
    for folder in (source, path):
        loaded = load(ModelSpec(str(folder)))
        talk = Talk(loaded, 5, (1, 5, 4), 4, (2, 3, 3), 6)
        feeder = Feeder(loaded)
        made.append(feeder.feed(feeder.start(), talk, len(talk)))
    assert difference(*made) < TOLERANCE
