"""Scenarios in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcache.bench.context import FULL, QUICK, Clock, Context, Subject
from mlxcache.bench.findings import Findings
from mlxcache.bench.prove import ChildFailed, in_child, scale_for
from mlxcache.model.folder import checked_config
from tests.toys.toy import make_toy


def context(model: Path, tmp_path: Path) -> Context:
    subject, found = Subject(model, "m", checked_config(model)), Findings("x", "m")
    return Context(subject, QUICK, Clock(60), tmp_path, 10**10, found, lambda _: None)


def test_a_failing_process_tells_the_end_of_its_output(tmp_path: Path) -> None:
    """A scenario that fails takes nothing else with it."""
    one = context(make_toy(tmp_path / "model"), tmp_path)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ChildFailed, match=r"(?s)equality ended with status 1.*ModelError"):
        in_child("equality")(one)


def test_random_kv_does_not_stand_for_a_model_with_states(tmp_path: Path) -> None:
    """The disk scenarios need it; growth computes its prefix instead."""
    one = context(make_toy(tmp_path / "model", "qwen3_5"), tmp_path)
    in_child("restore_speed")(one)
    assert one.found.status == "not applicable"
    assert "more than KV" in str(one.found.error)
    in_child("peak_memory")(one)
    assert one.found.tables


def test_lengths_stay_within_the_context_of_the_model() -> None:
    """Of those that know one."""
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    short = Subject(Path(), "m", config | {"max_position_embeddings": 8_000})
    scale = scale_for(short, FULL)
    assert scale.deep == 6_000
    assert scale.disk_bytes == 6_000 * 2 * 2 * 2 * 4 * 8
    assert scale_for(Subject(Path(), "m", config), FULL) == FULL
