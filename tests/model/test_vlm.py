"""Models of mlx-vlm go on alike when they were cut, written and put together.

Skipped where mlx-vlm is not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache

from mlxcache.errors import ModelError, Unsupported
from mlxcache.model import kv
from mlxcache.model.adapters import adapter_of
from mlxcache.model.backend import FAMILIES
from mlxcache.model.examine import examine
from mlxcache.model.kv import Layout
from mlxcache.model.lineage import Lineage
from mlxcache.model.load import Loaded, ModelSpec, load
from mlxcache.model.mlx_lm_format import check_portable
from tests.conftest import ToyMaker
from tests.model.seeing import poison
from tests.model.test_every_model import saved
from tests.toys.configs import SEEING, VLM, toy_options
from tests.toys.toy import FUSED

CHUNKS = (70, 1, 1, 33, 1, 1, 8, 1, 40)
"""A prompt longer than the window of 32 tokens, in chunks shorter and longer than that."""
PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
AT, PARTED = 105, 50
"""Where a checkpoint is, and where a copy of the KV is put together from two parts."""
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=[*sorted(VLM), *SEEING])
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def loaded(name: str, toy: ToyMaker) -> Loaded:
    return load(ModelSpec(str(toy(**toy_options(name), layers=2, window=32, **FUSED))))


def ids(seed: int, count: int = sum(CHUNKS)) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(10, 400, count)]


def cold(loaded: Loaded, tokens: list[int]) -> mx.array:
    from mlx_vlm.models.cache import make_prompt_cache

    own = loaded.model.language_model
    for _, module in own.named_modules():
        if hasattr(module, "_rope_deltas"):
            module._rope_deltas = module._position_ids = None
    with uncompiled():
        out: mx.array = own(mx.array(tokens)[None], cache=make_prompt_cache(own)).logits[0, -1]
        mx.eval(out)
    return out


@contextmanager
def uncompiled() -> Iterator[None]:
    """Some of mlx-vlm's compiled functions are right for the first shape only."""
    mx.disable_compile()
    try:
        yield
    finally:
        if not os.environ.get("MLX_DISABLE_COMPILE"):
            mx.enable_compile()


def feed(loaded: Loaded, line: Lineage, tokens: list[int]) -> mx.array:
    """Feed a chunk, after another request has left its positions in the modules."""
    poison(loaded.model)
    logits: mx.array = loaded.model(mx.array(tokens)[None], cache=line.caches)[0, -1]
    kv.eval_states(line.caches)
    line.length += len(tokens)
    assert line.aligned()
    return logits


def difference(one: mx.array, other: mx.array) -> float:
    return float(mx.abs(one.astype(mx.float32) - other.astype(mx.float32)).max())


def test_each_family_is_run_by_mlx_vlm(loaded: Loaded, name: str) -> None:
    assert loaded.info.backend == "mlx-vlm"
    assert (loaded.vision is not None) is (name in SEEING)
    assert {one.partition("+")[0] for one in (*VLM, *SEEING)} == set(FAMILIES)


def test_no_prompt_cache_is_written_of_classes_that_mlx_lm_lacks(loaded: Loaded) -> None:
    layout = kv.survey(loaded.model)
    adapters = [adapter_of(slot) for slot in kv.flatten(layout.make())]
    names = {adapter.name for adapter in adapters if adapter is not None}
    if all(hasattr(mlx_lm_cache, name) for name in names - {"ArraysCache"}):
        assert set(layout.foreign) <= {"ArraysCache"}
    else:
        with pytest.raises(Unsupported, match="export a snapshot"):
            check_portable(layout)


def test_chunks_cuts_and_checkpoints_go_on_like_the_whole(loaded: Loaded, tmp_path: Path) -> None:
    layout = kv.survey(loaded.model)
    assert layout.cacheable
    tokens = ids(1)
    expected = cold(loaded, tokens)
    line, twin = Lineage(layout), Lineage(layout)
    states: dict[int, kv.State] = {}
    at = 0
    for size in CHUNKS:
        logits = feed(loaded, line, tokens[at : at + size])
        at += size
        states[at] = saved(line.capture(), layout, tmp_path / f"{at}.safetensors")
    assert difference(logits, expected) < TOLERANCE
    twin.fill([(line.detach(0, PARTED), 0, PARTED), (line, PARTED, AT)], 200)
    twin.length = AT
    twin.restore(states[AT])
    assert difference(feed(loaded, twin, tokens[AT:]), expected) < TOLERANCE


def test_two_conversations_in_turn(loaded: Loaded) -> None:
    layout = kv.survey(loaded.model)
    talks = [ids(2, 61), ids(3, 90)]
    lines = [Lineage(layout) for _ in talks]
    for line, talk in zip(lines, talks, strict=True):
        feed(loaded, line, talk[:-4])
    for step in (-4, -3, -2, -1):
        for line, talk in zip(lines, talks, strict=True):
            made = feed(loaded, line, [talk[step]])
            expected = cold(loaded, talk[: len(talk) + step + 1])
            assert difference(made, expected) < TOLERANCE


def test_positions_of_other_requests_would_show(loaded: Loaded) -> None:
    """The tests above can fail: without positions of the call, those in the modules are used."""
    own = loaded.model.language_model
    tokens = ids(4, 40)
    expected = cold(loaded, tokens)
    held = poison(own)
    with uncompiled():
        made = own(mx.array(tokens)[None], cache=loaded.model.make_cache()).logits[0, -1]
    positions = FAMILIES[loaded.info.architecture].positions
    assert (held == 0) == (positions == "caches")
    if positions == "axes":
        assert difference(made, expected) > 100 * TOLERANCE
    else:  # MiniMax M3 uses what its modules hold in batches only
        assert difference(made, expected) < TOLERANCE


def test_the_page_says_how_it_is_reused(loaded: Loaded, name: str) -> None:
    if name in SEEING:
        return  # `test_vlm_images` looks for its row
    from mlx_vlm.models.cache import make_prompt_cache

    layout = kv.survey(loaded.model, evaluate=False)
    raw = make_prompt_cache(loaded.model.language_model)
    classes = ", ".join(dict.fromkeys(f"`{described(cache)}`" for cache in raw))
    reuse = "from checkpoints" if layout.opaque else "any token"
    reuse = "any token; from checkpoints if memory is short" if layout.keeps_rows else reuse
    batches = "yes" if layout.batchable else "no"
    row = f"| `{loaded.info.architecture}` | {classes} | {reuse} | {batches} |"
    assert row in PAGE.read_text(encoding="utf-8").splitlines()


def described(cache: Any) -> str:
    parts = getattr(cache, "caches", None)
    name = type(cache).__name__
    return name if parts is None else f"{name}({', '.join(map(described, parts))})"


def test_it_is_examined_as_from_its_configuration_alone(loaded: Loaded) -> None:
    from mlxcache.model.vlm import make_model

    def facts(layout: Layout) -> tuple[Any, ...]:
        return layout.specs, layout.states, layout.batchable

    found = examine(ModelSpec(str(loaded.path)))
    assert found.info.backend == "mlx-vlm"
    outlined = kv.survey(make_model(loaded.config, images=True), evaluate=False)
    assert facts(found.layout) == facts(outlined)


def test_what_has_no_part_in_it_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    with pytest.raises(ModelError, match="--adapter"):
        load(ModelSpec(str(loaded.path), adapter=str(adapter)))
    with pytest.raises(ModelError, match="--kv-bits 8: this model is run by mlx-vlm"):
        kv.survey(loaded.model, kv_bits=8)


def test_mlx_vlm_itself_is_given_no_code_and_no_files_elsewhere(
    loaded: Loaded, tmp_path: Path
) -> None:
    """Even by a caller that does not ask `choose_backend`."""
    from mlxcache.model.vlm import load_model

    config = json.loads((loaded.path / "config.json").read_text())
    for changes, said in (
        ({"model_file": "own.py"}, "its own Python code"),
        ({"architectures": ["DFlash2DraftModel"]}, "would not load it as model type"),
        ({"text_config": {"ple_storage": {"manifest": "/etc/passwd"}}}, "files apart"),
        ({"llm_config": {"ple_storage": {"manifest": "/etc/passwd"}}}, "files apart"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ModelError, match=said):
            load_model(tmp_path)


def test_importing_mlx_vlm_does_not_trust_the_code_of_models(toy: ToyMaker) -> None:
    """Its modules replace a function of transformers by one that does; that is undone."""
    path = toy("qwen3_5_moe_text", layers=2, window=32, **FUSED)
    code = (
        "from transformers import AutoProcessor\n"
        "def now(): return vars(AutoProcessor)['from_pretrained']\n"
        "first = now()\n"
        "from mlxcache.model.load import ModelSpec, load\n"
        f"load(ModelSpec({str(path)!r}))\n"
        "print(now() is first)\n"
        "import importlib, sys\n"
        "del sys.modules['mlx_vlm.models.qwen3_5_moe_text']\n"
        "importlib.import_module('mlx_vlm.models.qwen3_5_moe_text')\n"
        "print(now() is first)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True", "False"]
