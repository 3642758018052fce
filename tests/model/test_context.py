"""The context length that a model's files state."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcache.errors import ModelError
from mlxcache.model.folder import UNSTATED, context_length, native_length

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 40960}, 40960),
        ({"n_positions": 1024}, 1024),
        ({"max_seq_len": 2048}, 2048),
        ({"seq_length": 8192, "max_position_embeddings": 32768}, 32768),
        ({"text_config": {"max_position_embeddings": 131072}}, 131072),
        ({"max_position_embeddings": 77, "text_config": {"max_position_embeddings": 99}}, 99),
        ({"text_config": {"hidden_size": 8}, "max_position_embeddings": 77}, 77),
        ({"max_position_embeddings": 32768, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": YARN}, 131072),
        ({"max_position_embeddings": 40960, "rope_parameters": YARN}, 131072),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "yarn", "factor": 2}}, 200),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 8}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": None}, 100),
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 32768,
                "rope_parameters": {"full_attention": YARN, "sliding_attention": {}},
            },
            131072,
        ),
    ],
)
def test_the_config_states_the_length(config: dict[str, Any], length: int) -> None:
    assert native_length(config, 512) == length


def test_the_tokenizer_is_asked_last() -> None:
    assert native_length({}, 8192) == 8192
    assert native_length({}, 10**30) is None
    assert native_length({"max_position_embeddings": None}, None) is None
    assert native_length({"max_position_embeddings": "long"}, True) is None


def test_less_may_be_asked_for_and_more_may_not() -> None:
    assert context_length(4096, None) == 4096
    assert context_length(4096, 1000) == 1000
    assert context_length(None, None) == UNSTATED
    assert context_length(None, 10**6) == 10**6
    with pytest.raises(ModelError, match=r"at most 4096.*rope_scaling"):
        context_length(4096, 4097)
    with pytest.raises(ModelError, match="at least 1"):
        context_length(4096, 0)
