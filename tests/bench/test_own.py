"""The model's own time."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.bench.equality import rounding
from mlxcache.bench.lone_model import LoneModel
from mlxcache.bench.own_time import NoOwnTime, measuring
from mlxcache.types import token_ids
from tests.toys.toy import make_toy


def count_fed(own: LoneModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each pass of the model from now on."""
    fed: list[int] = []
    call = type(own.model).__call__

    def counted(model, tokens, *rest, **named):
        fed.append(tokens.shape[1])
        return call(model, tokens, *rest, **named)

    monkeypatch.setattr(type(own.model), "__call__", counted)
    return fed


def test_each_measurement_starts_from_the_prefix_and_leaves_no_trace(tmp_path: Path) -> None:
    """The cache is cut back, also to a shorter prefix, and fed where it is too short."""
    own = LoneModel(make_toy(tmp_path))
    for prefix in (300, 300, 100, 200):
        assert own.seconds(prefix, 20) > 0
        assert prefix + 20 <= own.cache[0].offset <= prefix + 22
    # four layers, keys and values, two heads of 32, four bytes each
    assert own.kv_bytes_per_token() == 4 * 2 * 2 * 32 * 4


def test_a_missing_prefix_of_plain_kv_is_noise(tmp_path: Path, monkeypatch) -> None:
    """It costs no pass, and leaves a cache of the right length and dtype."""
    own = LoneModel(make_toy(tmp_path))
    own.seconds(8, 4)
    fed = count_fed(own, monkeypatch)
    own.seconds(2000, 4)
    assert sum(fed) <= 4 + 2
    assert {layer.keys.dtype for layer in own.cache} == {mx.float32}
    assert own.cache[0].offset >= 2004


def test_decoding_is_timed_and_its_peak_taken_after_the_first_token(tmp_path: Path) -> None:
    """The prefix is not part of either; a second time nothing is left of the first."""
    own = LoneModel(make_toy(tmp_path, emits={"<|im_end|>": 2}))
    for _ in range(2):
        rate, peak = own.decoding(1000, 24)
        assert rate > 0
        assert own.cache[0].offset == 1000 - 1 + 24 + 1
        assert peak < 1000 * own.kv_bytes_per_token()


def test_a_prompt_is_fed_in_passes_of_the_given_length(tmp_path: Path, monkeypatch) -> None:
    """From nothing each time, and without touching the kept cache."""
    own = LoneModel(make_toy(tmp_path))
    fed = count_fed(own, monkeypatch)
    assert own.prefill(101, 40) > 0
    assert fed[:4] == [40, 40, 20, 1]
    assert own.cache[0].offset == 0


def test_rounding_is_what_two_ways_of_feeding_differ_by(tmp_path: Path) -> None:
    """Nothing to speak of in float32."""
    own = LoneModel(make_toy(tmp_path))
    assert 0 <= rounding(own.model, token_ids(own.rng.integers(0, 256, 300, np.int32)), 270) < 1e-3


def test_a_cache_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    """A copy of its state would be measured with it."""
    model = make_toy(tmp_path, "qwen3_5")
    with pytest.raises(ValueError, match="cannot be cut back"):
        LoneModel(model)


def test_the_process_answers_until_the_block_ends(tmp_path: Path) -> None:
    """And a question that it cannot answer is an error, not a wait."""
    with measuring(make_toy(tmp_path / "model"), tmp_path) as own:
        assert own is not None
        seconds, kv_bytes = own.ask(64, 8)
        assert seconds > 0
        assert kv_bytes == 2048
        assert own.decode(64, 8)[0] > 0
        assert own.prefill(64, 16) > 0
        with pytest.raises(NoOwnTime):
            own.ask(64, -1)
    assert own.process.returncode is not None
