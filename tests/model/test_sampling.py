"""Drawing tokens: ranges, filters, seeds, penalties, log-probabilities."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import GenerationBatch, StopSequences
from mlx_lm.models.cache import make_prompt_cache

from mlxcache.errors import BadRequest
from mlxcache.model.load import ModelSpec, load
from mlxcache.model.sampling import (
    LEAST_LOGPROB,
    make_processors,
    make_sampler,
    masked,
    skip_draws,
    token_text,
    top_logprobs,
    validate,
)
from mlxcache.types import Sampling

V = 32


def logprobs(rows: int = 1, seed: int = 0) -> mx.array:
    logits = 2 * mx.random.normal((rows, V), key=mx.random.key(seed))
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def draws(sampling: Sampling, n: int, values: mx.array | None = None) -> list[int]:
    sampler = make_sampler(sampling, V)
    values = logprobs() if values is None else values
    return [int(sampler(values)) for _ in range(n)]


def test_the_defaults_are_valid_and_greedy() -> None:
    validate(Sampling(), V)
    assert draws(Sampling(), 3) == [int(mx.argmax(logprobs()))] * 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 5.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**40),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", -math.inf),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.nan),
        ("repetition_context", 0),
        ("xtc_probability", 1.1),
        ("xtc_probability", math.nan),
        ("xtc_threshold", 0.6),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("logit_bias", ((V, 1.0),)),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, math.nan),)),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        validate(replace(Sampling(), **{field: value}), V)
    assert caught.value.param == field.replace("_context", "_context_size")


def test_a_biased_token_that_the_model_lacks_is_named() -> None:
    with pytest.raises(BadRequest, match=f"names token {V}, but token ids are from 0 to {V - 1}"):
        validate(Sampling(logit_bias=((V, 1.0),)), V)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=5, top_p=1, min_p=1, top_k=-1),
        Sampling(temperature=1e-9, top_p=1e-9, top_k=2**31 - 1),
        Sampling(presence_penalty=-2, frequency_penalty=2, repetition_penalty=0.01),
        Sampling(temperature=1, seed=-(2**63), logit_bias=((V - 1, -100.0), (0, 100.0))),
        Sampling(temperature=1, seed=2**64 - 1, repetition_penalty=100),
        Sampling(temperature=1, xtc_probability=1, xtc_threshold=0),
        Sampling(temperature=1, xtc_probability=1e-9, xtc_threshold=0.5, repetition_context=1),
    ],
)
def test_the_ends_of_each_range_draw_a_token(sampling: Sampling) -> None:
    validate(sampling, V)
    logits = logprobs()
    for process in make_processors(sampling, 1):
        logits = process(mx.array([1, 2, 2, 3]), logits)
    assert bool(mx.all(mx.isfinite(logits)).item())
    for token in draws(sampling, 5, logits - mx.logsumexp(logits, axis=-1, keepdims=True)):
        assert 0 <= token < V


def test_greedy_requests_share_one_function() -> None:
    """A batch of greedy rows is drawn in one call, which mlx-lm does if the object is the same."""
    assert make_sampler(Sampling(), V) is make_sampler(Sampling(temperature=0, seed=3), 99)
    assert make_sampler(Sampling(temperature=1), V) is not make_sampler(Sampling(temperature=1), V)


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-45])
def test_next_to_zero_is_greedy(temperature: float) -> None:
    """Dividing by it overflows neither half precision nor any other."""
    size = 70_000
    values = mx.full((1, size), -11.2)
    values[0, 60_000] = -11.0
    sampler = make_sampler(Sampling(temperature=temperature, seed=1), size)
    assert sampler(values.astype(mx.float16)).item() == 60_000


def test_a_seed_repeats_and_its_absence_does_not() -> None:
    plain = Sampling(temperature=1.5)
    assert draws(replace(plain, seed=7), 40) == draws(replace(plain, seed=7), 40)
    assert draws(replace(plain, seed=7), 40) != draws(replace(plain, seed=8), 40)
    assert draws(plain, 40) != draws(plain, 40)


def test_xtc_removes_all_but_the_least_likely_choice() -> None:
    """Of the tokens above the threshold one is left, of those in `kept` all, at its probability."""
    values = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]]))
    always = Sampling(temperature=1, xtc_probability=1, xtc_threshold=0.1, seed=2)
    sampler = make_sampler(always, 4)
    assert {int(sampler(values)) for _ in range(60)} == {2, 3}
    sampler = make_sampler(always, 4, kept=(0, 9))
    assert {int(sampler(values)) for _ in range(60)} == {0, 2, 3}
    sampler = make_sampler(replace(always, xtc_probability=0.5), 4)
    drawn = [int(sampler(values)) for _ in range(400)]
    assert 120 < sum(token < 2 for token in drawn) < 200  # 0.8 of half of them


def test_xtc_draws_from_the_key_of_the_request() -> None:
    """A seed repeats whatever the global generator does, and `skip_draws` counts its draws."""
    wanted = Sampling(temperature=1.5, xtc_probability=0.5, xtc_threshold=0.02, seed=7)
    mx.random.seed(1)
    first = draws(wanted, 40)
    mx.random.seed(2)
    assert draws(wanted, 40) == first
    assert draws(replace(wanted, xtc_probability=0.0), 40) != first
    later = make_sampler(wanted, V)
    skip_draws(later, 30)
    assert [int(later(logprobs())) for _ in range(10)] == first[30:]


def test_seeded_draws_do_not_depend_on_the_global_generator() -> None:
    sampler = make_sampler(Sampling(temperature=1.5, seed=7), V)
    mixed = []
    for _ in range(20):
        mx.random.uniform(shape=(3,))
        mixed.append(int(sampler(logprobs())))
    assert mixed == draws(Sampling(temperature=1.5, seed=7), 20)


def test_rounding_does_not_change_what_a_seed_draws() -> None:
    """In a batch the same logits come out a little different, and the text must not."""
    size = 50_000
    logits = 3 * mx.random.normal((1, size), key=mx.random.key(0))
    wanted = Sampling(temperature=1, seed=5)
    plain, other = make_sampler(wanted, size), make_sampler(wanted, size)
    for i in range(400):
        rounding = 1e-6 * mx.random.normal((1, size), key=mx.random.key(i))
        assert plain(logits).item() == other(logits + rounding).item()


def test_draws_follow_the_distribution() -> None:
    """At temperature 2 the observed frequencies match softmax(logprobs / 2)."""
    values = logprobs()
    expected: Any = mx.softmax(values / 2, axis=-1)[0].tolist()
    sampler = make_sampler(Sampling(temperature=2, seed=1), V)
    counts = [0] * V
    drawn: Any = sampler(mx.broadcast_to(values, (20_000, V))).tolist()
    for token in drawn:
        counts[token] += 1
    for seen, p in zip(counts, expected, strict=True):
        assert seen / 20_000 == pytest.approx(p, abs=5 * math.sqrt(p / 20_000) + 1e-3)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_filters_leave_only_what_they_allow(dtype: mx.Dtype) -> None:
    values = logprobs()
    order: Any = mx.argsort(-values[0]).tolist()
    probabilities: Any = mx.exp(values[0]).tolist()
    hot = Sampling(temperature=5, seed=1)
    values = values.astype(dtype)
    assert set(draws(replace(hot, top_k=3), 200, values)) == set(order[:3])
    assert set(draws(replace(hot, top_k=1), 20, values)) == {order[0]}
    floor = 0.2 * probabilities[order[0]]
    allowed = {t for t in range(V) if probabilities[t] >= floor}
    assert set(draws(replace(hot, min_p=0.2), 300, values)) == allowed
    nucleus, mass = set(), 0.0
    for token in order:
        nucleus.add(token)
        if (mass := mass + probabilities[token]) >= 0.6:
            break
    assert set(draws(replace(hot, top_p=0.6), 300, values)) == nucleus
    for least in (1e-9, 1e-46, 5e-324):  # two of them are 0 as float32
        assert set(draws(replace(hot, top_p=least), 20, values)) == {order[0]}


@pytest.mark.skipif(sys.platform == "darwin", reason="Metal's kernels are no files")
def test_no_value_makes_mlx_compile_a_kernel(tmp_path: Path) -> None:
    """A compilation takes half a second on a CPU, while all requests wait."""
    everything = Sampling(
        temperature=0.8, top_p=0.871, min_p=0.0171, top_k=7, xtc_probability=1, xtc_threshold=0.0171
    )
    os.putenv("TMPDIR", str(tmp_path))  # MLX compiles what is new to this process there
    try:
        mx.eval(make_sampler(everything, V, (1,))(logprobs()))
    finally:
        os.putenv("TMPDIR", tempfile.gettempdir())
    assert list(tmp_path.iterdir()) == []


def test_a_top_k_of_the_whole_vocabulary_is_off() -> None:
    """mlx-lm's filter refuses it; a client that sends a large number means no filter."""
    free = Sampling(temperature=2, seed=3)
    assert draws(replace(free, top_k=V), 30) == draws(free, 30)
    assert draws(replace(free, top_k=-1), 30) == draws(free, 30)


def test_a_whole_batch_may_share_a_sampler() -> None:
    sampler = make_sampler(Sampling(temperature=1, top_p=0.9, top_k=5, min_p=0.01), V)
    assert sampler(logprobs(4)).shape == (4,)


def test_presence_and_frequency_count_the_reply_alone() -> None:
    """OpenAI's formula over the tokens after the prompt, the whole reply, in the logits' dtype."""
    (process,) = make_processors(Sampling(presence_penalty=0.5, frequency_penalty=0.25), 3)
    logits = mx.zeros((1, V), mx.bfloat16)
    assert process(mx.array([1, 1, 2]), logits).tolist() == logits.tolist()
    out = process(mx.array([1, 1, 2, 4, 4, 5] + [6] * 100), logits)
    assert out.dtype == mx.bfloat16
    row: Any = out[0].tolist()
    assert (row[1], row[2], row[4], row[5]) == (0, 0, -1.0, -0.75)
    assert row[6] == pytest.approx(-25.5, rel=0.01)


def test_the_repetition_penalty_forgets_old_tokens() -> None:
    (process,) = make_processors(Sampling(repetition_penalty=2.0), 0)
    logits = mx.array([[4.0, -4.0, 4.0, 1.0]])
    tokens = [2] + [0, 1] * 32
    assert process(mx.array(tokens), logits).tolist() == [[2.0, -8.0, 4.0, 1.0]]
    wider = Sampling(repetition_penalty=2.0, repetition_context=65)
    (process,) = make_processors(wider, 0)
    logits = mx.array([[4.0, -4.0, 4.0, 1.0]])
    assert process(mx.array(tokens), logits).tolist() == [[2.0, -8.0, 2.0, 1.0]]


def test_the_bias_is_added_and_the_rest_left() -> None:
    (process,) = make_processors(Sampling(logit_bias=((1, 2.0), (3, -100.0), (1, 0.5))), 0)
    assert process(mx.array([0]), mx.zeros((1, 4))).tolist() == [[0.0, 2.5, 0.0, -100.0]]


def test_no_wish_no_processor() -> None:
    assert make_processors(Sampling(temperature=1, top_p=0.5, seed=1), 10) == []


class Letters:
    def convert_ids_to_tokens(self, token: int) -> str | None:
        return {0: "\u2581a", 1: "b"}.get(token)

    def decode(self, ids: list[int]) -> str:
        return "ab"[ids[0]]


def test_top_logprobs_are_sorted_and_exact() -> None:
    """The likeliest first, the sampled token's own beside them, minus infinity as a number.

    A token that cannot be drawn is no alternative: a mask leaves most of a vocabulary so.
    """
    values = mx.log(mx.array([[0.25, 0.7, 0.05, 0.0]]))
    (found,) = top_logprobs(values, [3], 2, Letters())
    assert (found.token, found.token_id, found.logprob) == ("", 3, LEAST_LOGPROB)
    assert [(text, i) for text, i, _ in found.top] == [("b", 1), (" a", 0)]
    assert [x for *_, x in found.top] == pytest.approx([math.log(0.7), math.log(0.25)], rel=1e-5)
    assert top_logprobs(values, [1], 0, Letters())[0].top == ()
    assert len(top_logprobs(values, [1], 20, Letters())[0].top) == 3


@pytest.mark.parametrize(
    ("piece", "decoded", "text"),
    [
        ("\u00e2\u0124", "\ufffd", "\udce2\udc82"),  # as a byte-level vocabulary writes bytes
        ("<0xE2>", "\ufffd", "\udce2"),  # as SentencePiece does
        ("\u00ef\u00bf\u00bd", "\ufffd", "\ufffd"),
        ("\u4e00", "\ufffd", "\ufffd"),
        ("\u2581so", "so", " so"),
    ],
)
def test_a_part_of_a_character_keeps_its_bytes(piece: str, decoded: str, text: str) -> None:
    """Whichever way the vocabulary spells them; a notation that is not known stays U+FFFD."""
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda _: piece, decode=lambda _: decoded)
    assert token_text(tokenizer, 5) == text


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, V), st.integers(0, V - 1))
def test_top_logprobs_agree_with_sorting(seed: int, n: int, token: int) -> None:
    values = logprobs(seed=seed)
    (found,) = top_logprobs(values, [token], n, Letters100())
    rows: Any = values[0].tolist()
    best = sorted(range(V), key=lambda i: -rows[i])[:n]
    assert [i for _, i, _ in found.top] == best
    assert found.logprob == pytest.approx(rows[token])


class Letters100(Letters):
    def convert_ids_to_tokens(self, token: int) -> str | None:
        return "b"

    def decode(self, ids: list[int]) -> str:
        return str(ids[0])


def test_a_seeded_row_draws_alike_alone_and_in_a_batch(toy_llama: Any) -> None:
    """mlx-lm's own batch calls each row's sampler with that row alone."""
    loaded = load(ModelSpec(str(toy_llama)))
    prompt = [5, 6, 7, 8]
    wishes = [
        Sampling(temperature=1, seed=1, presence_penalty=1.0),
        Sampling(),
        Sampling(temperature=1, seed=1, presence_penalty=1.0),
        Sampling(temperature=2, seed=2, top_k=40, logit_bias=((9, 3.0),)),
    ]
    together = generate(loaded.model, prompt, wishes)
    for wish, tokens in zip(wishes, together, strict=True):
        assert generate(loaded.model, prompt, [wish]) == [tokens]
    assert together[0] == together[2]
    assert together[0] != together[1]


def generate(model: Any, prompt: list[int], wishes: list[Sampling]) -> list[list[int]]:
    caches = [make_prompt_cache(model) for _ in wishes]
    for cache in caches:
        model(mx.array([prompt[:-1]]), cache=cache)
    merged = [layer[0].merge(list(layer)) for layer in zip(*caches, strict=True)]
    n = len(wishes)
    batch = GenerationBatch(
        model,
        list(range(n)),
        mx.array([prompt[-1]] * n),
        merged,
        [prompt[:-1] for _ in wishes],
        [make_sampler(w, 512) for w in wishes],
        make_sampler(Sampling(), 512),
        [make_processors(w, len(prompt)) for w in wishes],
        [StopSequences() for _ in wishes],
        [100] * n,
    )
    out: list[list[int]] = [[] for _ in wishes]
    for _ in range(12):
        for response in batch.next():
            out[response.uid].append(response.token)
    return out


# --- masks ----------------------------------------------------------------------------------------


def test_a_mask_leaves_the_logits_of_allowed_tokens_alone() -> None:
    """A row without a mask is free; what lies beyond a mask's end is forbidden."""
    logits = mx.random.normal((3, 70), key=mx.random.key(1))
    one, other = np.zeros(3, np.int32), np.full(2, -1, np.int32)
    one[1] = 1 << 5
    rows = np.asarray(masked(logits, [one, None, other]))
    assert np.flatnonzero(np.isfinite(rows[0])).tolist() == [37]
    assert rows[0, 37] == np.asarray(logits)[0, 37]
    assert (rows[1] == np.asarray(logits)[1]).all()
    assert np.flatnonzero(np.isfinite(rows[2])).tolist() == list(range(64))


def test_masks_are_applied_by_the_kernel_on_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets one row of bits for each row of logits; one without a mask has all of them set."""
    from llguidance import mlx as kernels

    given: list[mx.array] = []

    def kernel(logits: mx.array, bits: mx.array) -> mx.array:
        given.append(bits)
        return logits

    monkeypatch.setattr(kernels, "apply_token_bitmask_kernel", kernel)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    logits = mx.zeros((2, 40))
    assert masked(logits, [np.array([3, 1], np.int32), None]) is logits
    (bits,) = given
    assert bits.dtype == mx.int32
    assert bits.tolist() == [[3, 1], [-1, -1]]
