"""generation_config.json: what is taken, what is ignored, and who wins."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from mlxcache.model.sampling import describe, resolve, sampling_defaults
from mlxcache.types import DEFAULTED, Sampling


def defaults(folder: Path, **values: Any) -> dict[str, float]:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return sampling_defaults(folder)


def test_the_fields_of_a_real_file_are_read(tmp_path: Path) -> None:
    """The file of Qwen3-8B."""
    found = defaults(
        tmp_path, bos_token_id=151643, do_sample=True, eos_token_id=[151645, 151643],
        pad_token_id=151643, temperature=0.6, top_k=20, top_p=0.95, transformers_version="4.51.0",
    )  # fmt: skip
    assert found == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    assert describe(found) == "temperature 0.6, top_p 0.95, top_k 20"


def test_null_and_absent_are_no_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    assert defaults(tmp_path, temperature=None, top_k=None, do_sample=None) == {}


def test_do_sample_false_is_greedy_and_its_absence_means_nothing(tmp_path: Path) -> None:
    assert defaults(tmp_path, do_sample=False, temperature=0.7) == {"temperature": 0.0}
    assert defaults(tmp_path, temperature=0.7) == {"temperature": 0.7}


BAD: dict[str, list[Any]] = {
    "temperature": [-1, 7, "0.6", True, [0.6], float("nan")],
    "top_p": [0, 1.5, {}],
    "top_k": [2.5, -3, "20", float("inf")],
    "min_p": [-0.1, 2],
    "repetition_penalty": [0, -1.1],
    "do_sample": ["yes", 0, []],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in BAD for v in BAD[n]], ids=str)
def test_a_bad_value_is_a_warning_and_the_others_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, value: Any
) -> None:
    good = {"top_p": 0.9, "min_p": 0.1} if name != "top_p" else {"min_p": 0.1}
    good.pop(name, None)
    with caplog.at_level(logging.WARNING):
        assert defaults(tmp_path, **good, **{name: value}) == good
    assert name in caplog.text


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff\xfe", b'"text"', b"[" * 100_000])
def test_a_file_that_is_no_object_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    assert sampling_defaults(tmp_path) == {}
    assert "not a JSON object" in caplog.text


def test_a_default_applies_only_to_what_is_unset() -> None:
    own = {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    asked = Sampling(temperature=1.0, seed=3, unset=frozenset(DEFAULTED) - {"top_p"})
    assert resolve(asked, own) == Sampling(temperature=0.6, top_k=20, seed=3)
    assert resolve(asked, {}) == Sampling(temperature=1.0, seed=3)
    assert resolve(Sampling(), own) == Sampling()


def test_a_whole_number_written_as_a_float_is_a_top_k(tmp_path: Path) -> None:
    assert defaults(tmp_path, top_k=20.0) == {"top_k": 20}
    assert isinstance(defaults(tmp_path, top_k=20.0)["top_k"], int)
