"""Context length of a model, from its configuration and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mlxcache.errors import ModelError

UNSTATED = 131_072
"""Context length in tokens if a model's files state none, as those of many recurrent models."""

_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "seq_length",
    "n_ctx",
    "model_max_length",
)
_NESTED = ("text_config", "language_config", "llm_config")
_SANE = 1 << 27  # tokenizers state 10**30 for no limit


def native_length(config: Mapping[str, Any], tokenizer_length: object = None) -> int | None:
    """Return the context length that a model's files state, in tokens, or None.

    The text model's own section takes precedence over the top level. If it states the length before
    RoPE is scaled and the factor of the scaling, the product of the two counts if it is larger:
    model cards tell users to add YaRN without raising `max_position_embeddings`
    (https://arxiv.org/abs/2309.00071).
    """
    for section in _sections(config):
        stated = next((n for key in _KEYS if (n := _count(section.get(key)))), None)
        if stated:
            return max([stated, *_scaled(section, stated)])
    return _count(tokenizer_length)


def context_length(native: int | None, asked: int | None) -> int:
    """Return the context length to serve: what is asked for, else the model's own.

    Raises ModelError if `asked` exceeds `native` or is below 1.
    """
    if asked is None:
        return native or UNSTATED
    if asked < 1:
        raise ModelError(f"--context must be at least 1 token, but is {asked}.")
    if native is not None and asked > native:
        raise ModelError(
            f"--context {asked} is more than the {native} tokens this model was made for. "
            f"Ask for at most {native}, or, if the model's card describes one, add its "
            "rope_scaling (with factor and original_max_position_embeddings) to config.json."
        )
    return asked


def _sections(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key in _NESTED:
        if isinstance(section := config.get(key), Mapping):
            yield section
    yield config


def _scaled(section: Mapping[str, Any], stated: int) -> Iterator[int]:
    for key in ("rope_scaling", "rope_parameters"):
        rope = section.get(key)
        if not isinstance(rope, Mapping):
            continue
        # Models with several kinds of attention have one entry for each.
        for entry in (rope, *(v for v in rope.values() if isinstance(v, Mapping))):
            factor = entry.get("factor")
            original = _count(entry.get("original_max_position_embeddings"))
            if original is None and _kind(entry) == "yarn":
                original = stated
            if original and isinstance(factor, int | float) and factor > 1:
                yield int(original * factor)


def _kind(rope: Mapping[str, Any]) -> object:
    return rope.get("rope_type", rope.get("type"))


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _SANE:
        return None
    return int(value)
