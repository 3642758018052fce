"""Every model of the installed mlx-lm is known, and the page that says how each caches is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlx_lm.models.cache import KVCache

from tests.toys import classify, tiny
from tests.toys.classify import Family

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
UNKNOWN: dict[str, tuple[str, ...]] = {}
"""Models whose cache class has no adapter: served, and not cached."""


@pytest.fixture(scope="module")
def found() -> list[Family]:
    """A model that cannot be made or fed raises here: give it fields in `tiny`."""
    return list(classify.families())


def test_no_model_brings_a_class_that_is_unknown(found: list[Family]) -> None:
    """One that does needs an adapter, or a place in UNKNOWN and in the page."""
    assert {f.module: f.unknown for f in found if f.unknown} == UNKNOWN


def test_the_table_is_of_the_installed_mlx_lm(found: list[Family]) -> None:
    """`bin/model-families` makes it."""
    page = PAGE.read_text(encoding="utf-8")
    assert classify.with_table(page, classify.table(found)) == page


def test_every_family_that_the_project_promises_is_there(found: list[Family]) -> None:
    """By what can be done with its layers."""
    verbs = {f.module: f.verbs for f in found}
    hybrid, windows = {"slice", "checkpoint"}, {"slice", "window"}
    for name in ("qwen3_next", "qwen3_5", "nemotron_h", "falcon_h1", "granitemoehybrid", "lfm2"):
        assert verbs[name] == hybrid
    for name in ("jamba", "kimi_linear", "llama4", "bailing_moe_v3", "olmo_hybrid"):
        assert verbs[name] == hybrid
    for name in ("gemma3_text", "gemma4_text", "gpt_oss", "cohere2", "olmo3", "ministral3"):
        assert verbs[name] == windows
    for name in ("mamba", "mamba2", "rwkv7"):
        assert verbs[name] == {"checkpoint"}
    for name in ("llama", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"):
        assert verbs[name] == {"slice"}
    assert verbs["recurrent_gemma"] == {"window", "checkpoint"}
    assert verbs["gear"] == {"slice", "window", "checkpoint"}


def test_a_class_that_nobody_knows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strange(KVCache):
        pass

    real = tiny.make_tiny

    def strange(name: str) -> Any:
        model = real(name)
        kind = type("Model", (type(model),), {"make_cache": lambda self: [Strange()] * 4})
        model.__class__ = kind
        return model

    monkeypatch.setattr(tiny, "make_tiny", strange)
    family = classify.classified("llama")
    assert family.unknown == ("Strange",)
    assert classify.reuse(family) == "nothing: the class is unknown"
    assert not family.batches
    assert not family.quantised
