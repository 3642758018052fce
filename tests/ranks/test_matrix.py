"""Divided models in every way in which a client comes back; the proof has every family."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcache.store.parts import Mode
from tests.proofs.ranks_matrix import Group, Matrix, Precision


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "mode", "size", "precision"),
    [
        ("llama", "tensor", 4, Precision.FULL),
        ("gpt_oss", "tensor", 2, Precision.HALF),
        ("deepseek_v3", "pipeline", 4, Precision.FULL),
        ("qwen3_5", "pipeline", 2, Precision.HALF),
    ],
)
def test_a_group_answers_like_one_process(
    tmp_path: Path, family: str, mode: Mode, size: int, precision: Precision
):
    """Or, with parts of layers in half precision, warm and restored as cold."""
    matrix = Matrix(tmp_path, print)
    group = Group(family, mode, size, precision)
    matrix.try_group(group)
    assert matrix.wrong[group] == []
