"""DeepSeek V4.1's cache as rows: it goes on as mlx-lm's own does, from wherever it was cut."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxcache.model import kv
from mlxcache.model.grouped import GroupedCache, GroupRows
from mlxcache.model.lineage import Lineage
from tests.rounding import rounding
from tests.toys.shape import Shape
from tests.toys.weights import random_model
from tests.toys.windows import deepseek_v41

SHAPE = Shape(64, 32, 2, 2, 2, 24, 32, 4096, 8)
IDS = np.random.default_rng(5).integers(0, 64, 60).astype(np.int32)


def model_of(ratio: int) -> Any:
    """Its vectors have 40 numbers, which `ratio` may not divide, and which are not rounded."""
    config = deepseek_v41(SHAPE) | {"compress_ratios": [ratio, 1]}
    return random_model(config | {"head_dim": 40, "index_head_dim": 40}, 0)


SLOW = [pytest.param(ratio, marks=pytest.mark.slow) for ratio in (1, 4, 16)]


@pytest.fixture(scope="module", params=[2, 3, *SLOW])
def model(request: pytest.FixtureRequest) -> Any:
    return model_of(request.param)


def feed(model: Any, caches: list[Any], ids: Any) -> mx.array:
    logits: mx.array = model(mx.array(np.array(ids))[None], cache=caches)[0]
    kv.eval_states(caches)
    mx.eval(logits)
    return logits


def test_a_layer_reads_what_mlx_lm_would_give_it(model: Any) -> None:
    mine, theirs = kv.make_caches(model), make_prompt_cache(model)
    at = 0
    for size in (1, 2, 1, 7, 1, 1, 20, 1, 1, 1, 1, 5):
        logits = [
            model(mx.array(IDS[None, at : at + size]), cache=caches) for caches in (mine, theirs)
        ]
        assert mx.array_equal(*logits)
        at += size
        for one, other in zip(mine, theirs, strict=True):
            assert (one.offset, type(one)) == (other.offset, GroupedCache)
            for name in ("window", "compress_kv", "index_k", "pending_kv", "pending_gate"):
                held, expected = getattr(one, name), getattr(other, name)
                assert (held is None) == (expected is None), name
                assert held is None or mx.array_equal(held, expected), name


@pytest.mark.parametrize("room", [0, 1, 300])
def test_it_goes_on_from_any_position(model: Any, room: int) -> None:
    """From the rows before it and a checkpoint, whether or not the buffer has room for all rows.

    The rows after it, of another conversation, make no difference.
    """
    layout = kv.survey(model)
    whole = feed(model, layout.make(), IDS)
    line = Lineage(layout)
    line.grow(80)
    states = {}
    for at, token in enumerate(IDS[:40]):
        states[at] = line.capture()
        feed(model, line.caches, [token])
        line.advance(1)
    for at in range(17, 34, 5):
        other = Lineage(layout)
        other.fill([(line, 0, at)], at + room)
        other.restore(states[at])
        if room:
            feed(model, other.caches, [1, 2, 3][:room])
            other.advance(min(room, 3))
            other.truncate(at)
            other.restore(states[at])
        made = []
        for length in (1, 1, 3, 60 - at - 5):
            other.grow(other.length + length)
            rest = IDS[other.length : other.length + length]
            made.append(feed(model, other.caches, rest))
            other.advance(length)
            assert other.aligned()
        worst = mx.abs(mx.concatenate(made) - whole[at:]).max().item()
        assert worst <= rounding(whole), at  # type: ignore[operator]


def test_a_position_without_its_checkpoint_is_refused() -> None:
    model = model_of(4)
    line = Lineage(kv.survey(model))
    line.grow(80)
    feed(model, line.caches, IDS[:30])
    line.truncate(21)
    with pytest.raises(ValueError, match="no checkpoint of position 21"):
        feed(model, line.caches, IDS[:1])


def test_a_pass_can_be_measured_anywhere(model: Any) -> None:
    """From states of zeros, which are as large as those of that position are."""
    line = Lineage(kv.survey(model))
    line.grow(200)
    for at in (100, 0, 5, 64, 6):
        line.pretend(at)
        assert line.state_bytes == kv.nbytes(kv.states(kv.flatten(fed_caches(model, at)))) or not at
        feed(model, line.caches, IDS[:7])
        assert [cache.offset for cache in line.caches] == [at + 7] * 2
        assert {slot.offset for slot in line.linear} == {at + 7}


def fed_caches(model: Any, count: int) -> list[Any]:
    caches = kv.make_caches(model)
    if count:
        feed(model, caches, np.resize(IDS, count))
    return caches


def test_other_vectors_than_were_due_are_refused() -> None:
    """As they would be if mlx-lm appended in another way."""
    rows = GroupRows(4, 8)
    rows.begin(9)
    for shape in ((1, 1, 8), (1, 3, 8), (1, 2, 7)):
        with pytest.raises(ValueError, match="2 vectors of 8 numbers were due"):
            rows.add(mx.zeros(shape))


def test_a_step_copies_no_rows() -> None:
    """mlx-lm's own cache is copied whenever a group closes; here it is written in place."""
    model = model_of(2)
    line = Lineage(kv.survey(model))
    line.grow(200)
    feed(model, line.caches, IDS)
    kept = [address(slot.rows) for slot in line.linear]
    assert len(kept) == 4
    for token in IDS[:9]:
        feed(model, line.caches, [token])
    assert [address(slot.rows) for slot in line.linear] == kept


def address(array: mx.array) -> int:
    return int(np.asarray(array).ctypes.data)


def test_kv_takes_the_bytes_of_the_vectors_and_a_checkpoint_those_of_the_window() -> None:
    """Per token a fourth of a latent and of an index key, or each in full; no row of a window."""
    model = model_of(4)
    layout = kv.survey(model)
    assert layout.bytes_per_token == (40 + 40) * 4 * 5 // 4
    window, pending, newest = 8 * 40, 3 * 2 * 40, 2 * 40
    assert layout.checkpoint_bytes == 4 * (2 * window + pending + newest)
    line = Lineage(layout)
    line.grow(80)
    for length in (1, 20, 3):
        feed(model, line.caches, IDS[:length])
        line.settle()
        assert line.state_bytes <= layout.checkpoint_bytes
