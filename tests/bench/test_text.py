"""Filler text has the length asked for, and is the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from mlxcache.bench.text import Filler
from tests.toys.tokenizer import toy_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer in it."""
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "tokenizer.json").write_text(toy_tokenizer(512, False), encoding="utf-8")
    return path


def test_text_has_the_tokens_asked_for_and_follows_from_its_seed(folder: Path) -> None:
    """The same seed gives the same text, another one parts from it within a few tokens."""
    filler, tokenizer = Filler(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for tokens in (1, 34, 500):
        text = filler.text(tokens, "one")
        assert len(tokenizer.encode(text, add_special_tokens=False)) == tokens
        assert text == Filler(folder).text(tokens, "one")
    one, two = (tokenizer.encode(filler.text(64, seed)).ids for seed in ("one", "two"))
    assert one[:8] != two[:8]
