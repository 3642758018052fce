"""Sampling of the next token: validation, defaults, samplers, penalties, log-probabilities.

Samplers take log-probabilities and processors take raw logits, as mlx-lm's `GenerationBatch` calls
them; both run on the MLX thread.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import greedy_sampler, make_repetition_penalty
from mlx_lm.tokenizer_utils import _byte_decoder

from mlxcache.errors import BadRequest
from mlxcache.model.guidance.guide import Bitmask
from mlxcache.types import DEFAULTED, Sampling, TokenLogprob

log = logging.getLogger("mlxcache.model")

DEFAULTS_FILE = "generation_config.json"

Sampler = Callable[[mx.array], mx.array]
Processor = Callable[[mx.array, mx.array], mx.array]

_COLDEST = 1e-4  # below it tokens are drawn greedily; dividing by less overflows
_LEAST_TOP_P = 1e-9  # draws the likeliest token alone; 0 as a float32 would exclude even that
LEAST_LOGPROB = -9999.0  # sent for minus infinity, which JSON lacks, as OpenAI does
_LAST = -1e4  # added to a forbidden token; finite, so that it is drawn if a guide allows no other
_SPLITS_AT_ONCE = 256  # of a random key in one evaluation, to bound the size of its graph

_SEED_MASK = (1 << 64) - 1


def validate(sampling: Sampling, vocab_size: int | None = None) -> None:
    """Raise BadRequest, with the request's field as `param`, if a field is out of its range."""
    _within("temperature", sampling.temperature, 0.0, 5.0)
    _within("top_p", sampling.top_p, 0.0, 1.0)
    if sampling.top_p == 0:
        raise _refused("top_p", sampling.top_p, "more than 0 and at most 1")
    _within("min_p", sampling.min_p, 0.0, 1.0)
    _whole("top_k", sampling.top_k, -1, 2**31 - 1)
    _within("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    _within("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    _within("repetition_penalty", sampling.repetition_penalty, 0.01, 100.0)
    _whole("repetition_context_size", sampling.repetition_context, 1, 2**31 - 1)
    _within("xtc_probability", sampling.xtc_probability, 0.0, 1.0)
    _within("xtc_threshold", sampling.xtc_threshold, 0.0, 0.5)
    highest = (vocab_size or 2**31) - 1
    for token, bias in sampling.logit_bias:
        _within("logit_bias", bias, -100.0, 100.0)
        if not 0 <= token <= highest:
            raise _no_token("logit_bias", token, highest)
    for token in sampling.allowed_tokens:
        if not 0 <= token <= highest:
            raise _no_token("allowed_token_ids", token, highest)
    if sampling.seed is not None:
        _whole("seed", sampling.seed, -(2**63), 2**64 - 1)


def _within(field: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not math.isfinite(value) or not low <= value <= high:
        raise _refused(field, value, f"between {low:g} and {high:g}")


def _whole(field: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _refused(field, value, f"a whole number between {low} and {high}")


def _no_token(field: str, token: int, highest: int) -> BadRequest:
    message = f"{field} names token {token}, but token ids are from 0 to {highest}."
    return BadRequest(message, param=field, code="invalid_value")


def _refused(field: str, value: object, allowed: str) -> BadRequest:
    return BadRequest(
        f"{field} must be {allowed}, but is {value!r}.", param=field, code="invalid_value"
    )


def make_sampler(sampling: Sampling, vocab_size: int, kept: Sequence[int] = ()) -> Sampler:
    """Make a function from log-probabilities, shape (B, V), to token ids, shape (B,).

    For greedy sampling it is always the same, so that a batch of such requests is drawn in one
    call. Otherwise it has a random key of its own: the same seed draws the same tokens alone or in
    a batch. `kept`: ids of tokens that XTC never removes.
    """
    if sampling.temperature < _COLDEST:
        return greedy_sampler  # type: ignore[no-any-return]
    return _Draw(sampling, vocab_size, kept)


class _Draw:
    """Sampler that filters in mlx-lm's order (top_p, min_p, XTC, top_k), then draws a token.

    Not by mlx-lm's filters: they are compiled anew for each value of top_p or min_p, and never
    freed.
    """

    def __init__(self, sampling: Sampling, vocab_size: int, kept: Sequence[int]):
        self._sampling = sampling
        self._kept = [token for token in kept if token < vocab_size]
        self._top_k = sampling.top_k if 0 < sampling.top_k < vocab_size else 0
        seed = sampling.seed
        self._key = mx.random.key(
            int.from_bytes(os.urandom(8), "little") if seed is None else seed & _SEED_MASK
        )

    def __call__(self, logprobs: mx.array) -> mx.array:
        chosen = self._sampling
        self._key, key = mx.random.split(self._key)
        # in half precision the scaled values and the noise are too coarse for fair draws
        logprobs = logprobs.astype(mx.float32)
        if chosen.top_p < 1:
            logprobs = _without(logprobs, logprobs < _least_in_top_p(logprobs, chosen.top_p))
        if chosen.min_p > 0:
            least = logprobs.max(axis=-1, keepdims=True) + math.log(chosen.min_p)
            logprobs = _without(logprobs, logprobs < least)
        if chosen.xtc_probability > 0:
            key, coin = mx.random.split(key)
            logprobs = self._exclude(logprobs, coin)
        if self._top_k:
            beyond = mx.argpartition(-logprobs, self._top_k - 1, axis=-1)[..., self._top_k :]
            logprobs = mx.put_along_axis(logprobs, beyond, mx.array(-mx.inf), axis=-1)
        # not mx.random.categorical: it searches the summed probabilities, where a rounding error
        # shifts all later tokens, and the same seed gave another text
        noise = mx.random.gumbel(logprobs.shape, key=key)
        return mx.argmax(logprobs / chosen.temperature + noise, axis=-1)

    def _exclude(self, logprobs: mx.array, key: mx.array) -> mx.array:
        """Apply XTC: in some draws, remove all tokens above the threshold but the least likely."""
        chosen = self._sampling
        probs = mx.softmax(logprobs, axis=-1)
        above = mx.where(probs > chosen.xtc_threshold, probs, mx.inf)
        removed = probs > above.min(axis=-1, keepdims=True)
        if self._kept:
            removed[..., self._kept] = False
        drawn = mx.random.uniform(shape=(*logprobs.shape[:-1], 1), key=key)
        return _without(logprobs, removed & (drawn < chosen.xtc_probability))

    def skip(self, count: int) -> None:
        for done in range(1, count + 1):
            self._key, _ = mx.random.split(self._key)
            if done % _SPLITS_AT_ONCE == 0:
                mx.eval(self._key)
        mx.eval(self._key)


def _without(logprobs: mx.array, removed: mx.array) -> mx.array:
    return mx.where(removed, -mx.inf, logprobs)


def _least_in_top_p(logprobs: mx.array, top_p: float) -> mx.array:
    ascending = mx.sort(logprobs, axis=-1)
    probs = mx.exp(ascending)
    above = mx.cumsum(probs, axis=-1, reverse=True, inclusive=False)
    total = above[..., :1] + probs[..., :1]
    removed = (above >= max(_LEAST_TOP_P, top_p) * total).sum(axis=-1, keepdims=True)
    return mx.take_along_axis(ascending, removed, axis=-1)


def text_ends(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids of tokens that end a turn or a line, which XTC never removes."""
    return *sorted(tokenizer.eos_token_ids), *tokenizer.encode("\n", add_special_tokens=False)


def skip_draws(sampler: Sampler, count: int) -> None:
    """Advance a sampler of `make_sampler` as if it had drawn `count` more tokens."""
    if isinstance(sampler, _Draw):
        sampler.skip(count)


def make_processors(
    sampling: Sampling, prompt_len: int, ends: Collection[int] = ()
) -> list[Processor]:
    """Make functions that apply penalties and biases to logits; none if all are off.

    Each takes the token ids of prompt and reply, shape (n,), and logits, shape (1, V). The
    repetition penalty (https://arxiv.org/abs/1909.05858) applies to the newest `repetition_context`
    tokens, prompt included. Presence and frequency penalties are OpenAI's: they count all tokens of
    the reply. `ends`: the tokens that end a reply, which are not drawn before `min_tokens`.
    """
    processors: list[Processor] = []
    if sampling.repetition_penalty != 1:
        processors.append(
            make_repetition_penalty(sampling.repetition_penalty, sampling.repetition_context)
        )
    if sampling.presence_penalty or sampling.frequency_penalty:
        processors.append(_count_penalty(sampling, prompt_len))
    if sampling.logit_bias:
        processors.append(_bias(sampling))
    if sampling.allowed_tokens:
        processors.append(_only(sampling.allowed_tokens))
    if sampling.min_tokens and ends:
        processors.append(not_before(prompt_len + sampling.min_tokens, ends))
    return processors


def _count_penalty(sampling: Sampling, prompt_len: int) -> Processor:
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty

    def penalise(tokens: mx.array, logits: mx.array) -> mx.array:
        counts = mx.zeros(logits.shape[-1]).at[tokens[prompt_len:]].add(1.0)
        penalty = counts * frequency + (counts > 0) * presence
        return logits - penalty.astype(logits.dtype)

    return penalise


def _bias(sampling: Sampling) -> Processor:
    ids = mx.array([token for token, _ in sampling.logit_bias], dtype=mx.int32)
    values = mx.array([bias for _, bias in sampling.logit_bias], dtype=mx.float32)

    def bias(_: mx.array, logits: mx.array) -> mx.array:
        return logits.at[:, ids].add(values.astype(logits.dtype))

    return bias


def _only(allowed: tuple[int, ...]) -> Processor:
    ids = mx.array(allowed, dtype=mx.int32)

    def only(_: mx.array, logits: mx.array) -> mx.array:
        bias = mx.full(logits.shape[-1], _LAST, dtype=logits.dtype)
        bias[ids] = 0
        return logits + bias

    return only


def not_before(length: float, tokens: Collection[int]) -> Processor:
    """Make a processor that forbids `tokens` until prompt and reply have `length` tokens."""
    ids = mx.array(sorted(tokens), dtype=mx.int32)

    def not_yet(context: mx.array, logits: mx.array) -> mx.array:
        if len(context) >= length:
            return logits
        return logits.at[:, ids].add(mx.array(_LAST, dtype=logits.dtype))

    return not_yet


def masked(logits: mx.array, masks: Sequence[Bitmask | None]) -> mx.array:
    """Return `logits`, shape (rows, V), with minus infinity for forbidden tokens; one mask per row.

    A row whose mask is None keeps its logits. Tokens beyond the end of a mask are forbidden.
    """
    width = logits.shape[-1]
    words = (width + 31) // 32
    bits = np.zeros((len(masks), words), np.int32)
    for line, mask in zip(bits, masks, strict=True):
        if mask is None:
            line[:] = -1
        else:
            line[: mask.size] = mask[:words]
    if mx.metal.is_available() and mx.default_device() == mx.gpu:
        from llguidance.mlx import apply_token_bitmask  # noqa: PLC0415 - most never need it

        return apply_token_bitmask(logits, bits)
    allowed = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little", count=width)
    return mx.where(mx.array(allowed.view(np.bool_)), logits, mx.array(-mx.inf, logits.dtype))


def top_logprobs(
    logprobs: mx.array, tokens: Sequence[int], n: int, tokenizer: Any
) -> list[TokenLogprob]:
    """Return the log-probabilities of tokens and of the `n` likeliest beside each, for the API.

    `logprobs`: of shape (tokens, vocabulary).
    """
    values = logprobs.astype(mx.float32)
    n = min(n, values.shape[-1])
    ids = mx.array(list(tokens), mx.uint32)[:, None]
    if n:
        ids = mx.concatenate([ids, mx.argpartition(-values, kth=n - 1, axis=-1)[:, :n]], axis=-1)
    numbers = cast(list[list[float]], mx.take_along_axis(values, ids, axis=-1).tolist())
    return [
        _token_logprob(*pair, tokenizer)
        for pair in zip(cast(list[list[int]], ids.tolist()), numbers, strict=True)
    ]


def _token_logprob(ids: list[int], numbers: list[float], tokenizer: Any) -> TokenLogprob:
    (token, *likeliest), (logprob, *others) = ids, numbers
    top = sorted(zip(likeliest, others, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprob(
        token=token_text(tokenizer, token),
        token_id=token,
        logprob=max(logprob, LEAST_LOGPROB),
        top=tuple((token_text(tokenizer, i), i, x) for i, x in top if x > LEAST_LOGPROB),
    )


def token_text(tokenizer: Any, token: int) -> str:
    """Return the text of one token, with surrogate escapes for parts of a character."""
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece is None:
        return ""
    if piece.startswith("\u2581"):  # SentencePiece decoders drop the first space
        return str(piece.replace("\u2581", " "))
    text = str(tokenizer.decode([token]))
    raw = _token_bytes(piece) if "\ufffd" in text else None
    return text if raw is None else raw.decode(errors="surrogateescape")


def _token_bytes(piece: str) -> bytes | None:
    if _BYTE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    values = [_BYTE_OF.get(character) for character in piece]
    return None if None in values else bytes(cast(list[int], values))


_BYTE = re.compile("<0x[0-9A-F]{2}>")

_BYTE_OF: dict[str, int] = _byte_decoder()


# -- a model's own defaults ------------------------------------------------------------------------


def sampling_defaults(path: Path) -> dict[str, float]:
    """Return the valid defaults in generation_config.json, by fields of `Sampling`."""
    file, config = path / DEFAULTS_FILE, _read(path)
    if config is None:
        log.warning("%s ignored: not a JSON object", file)
        return {}
    found: dict[str, float] = {}
    for name in DEFAULTED:
        if (stated := config.get(name)) is None:
            continue
        if (value := _checked(name, stated)) is None:
            log.warning("%s: %s %r ignored: not a number in its range", file, name, stated)
        else:
            found[name] = value
    sampled = config.get("do_sample")
    if sampled is False:
        found["temperature"] = 0.0
    elif sampled not in (None, True):
        log.warning("%s: do_sample %r ignored: not true or false", file, sampled)
    return found


def is_object(path: Path) -> bool:
    """Return whether generation_config.json in the folder `path` is missing or a JSON object."""
    return _read(path) is not None


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((path / DEFAULTS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _checked(name: str, value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if name == "top_k" and isinstance(value, float):
        if not value.is_integer():
            return None
        value = int(value)
    try:
        validate(replace(Sampling(), **{name: value}))  # type: ignore[arg-type]
    except BadRequest:
        return None
    return value


def resolve(sampling: Sampling, defaults: Mapping[str, float]) -> Sampling:
    """Return `sampling` with the fields that the client left unset taken from `defaults`."""
    if not sampling.unset:
        return sampling
    found = {name: defaults[name] for name in sampling.unset & defaults.keys()}
    return replace(sampling, **found, unset=frozenset())  # type: ignore[arg-type]


def describe(defaults: Mapping[str, float]) -> str:
    """Format the model's sampling defaults in one line, such as `temperature 0.6, top_k 20`."""
    stated = ((name, defaults[name]) for name in DEFAULTED if name in defaults)
    return ", ".join(f"{name} {value:g}" for name, value in stated)
