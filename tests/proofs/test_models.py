"""The models that `bin/bench` makes: their replies encode to the tokens that were generated."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import cast

import pytest
from tokenizers import Tokenizer

from mlxcache.bench.random_model import lonely_letters
from mlxcache.bench.turns import Filler
from tests.proofs.models import recurrent, windowed
from tests.toys.tokenizer import toy_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "tokenizer.json").write_text(toy_tokenizer(512, False), encoding="utf-8")
    return path


def test_lonely_characters_come_back_as_the_tokens_they_were(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    letters = lonely_letters(tokenizer.get_vocab())
    assert len(letters) > 10
    text = "".join(itertools.chain(*itertools.product(letters, repeat=2)))
    assert tokenizer.encode(text, add_special_tokens=False).tokens == list(text)


def test_the_models_speak_in_characters_that_come_back_alone(tmp_path: Path) -> None:
    import mlx.core as mx

    for make in (windowed, recurrent):
        file = make(tmp_path / make.__name__) / "model.safetensors"
        weights = cast(dict[str, mx.array], mx.load(str(file)))
        (head,) = (weights[name] for name in weights if name.endswith("lm_head.weight"))
        rows = int((mx.abs(head).sum(axis=1) > 0).sum())
        assert 10 < rows < 100
        assert Filler(tmp_path / make.__name__).text(10, "a")
