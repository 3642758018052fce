"""Digests name a namespace and every token up to a position."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mlxcache.store.digests import Chains
from mlxcache.store.kv_files import block_checksums
from mlxcache.types import Tokens, join_ids
from tests.store.content import branch, tokens


def by_definition(namespace: str, ids: Tokens) -> bytes:
    digest = blake2b(namespace.encode(), digest_size=16).digest()
    for at in range(0, len(ids), 64):
        block = ids[at : at + 64]
        raw = b"".join(int(token).to_bytes(4, "little", signed=True) for token in block)
        if len(block) < 64:
            raw += bytes([len(block)])
        digest = blake2b(digest + raw, digest_size=16).digest()
    return digest


@given(st.integers(0, 300), st.text(max_size=5))
def test_every_prefix_has_the_digest_that_the_format_says(count, namespace):
    """Fixed digests of whole and partial blocks: files on disk stay valid."""
    ids = tokens(count, count)
    assert Chains(namespace).of(ids).at(count) == by_definition(namespace, ids)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400), st.booleans()), max_size=8))
def test_what_was_asked_before_changes_no_digest(asked):
    chains = Chains("n")
    last = tokens(400)
    for at, count, other in asked:
        last = branch(last, min(at, len(last)), at + count, count) if other else last[:count]
        if len(last) < 400:
            last = join_ids(last, tokens(400 - len(last), 3))
        chain = chains.of(last)
        fresh = Chains("n").of(last)
        assert chain.whole == fresh.whole
        assert chain.at(len(last)) == fresh.at(len(last))


@given(st.integers(1, 300), st.integers(0, 3))
def test_a_block_has_one_checksum_whatever_follows(count, tensors):
    rng = np.random.default_rng(count)
    arrays = [rng.integers(0, 255, (count, 5 + k), dtype=np.uint8) for k in range(tensors)]
    sums = block_checksums([array.data.cast("B") for array in arrays], count)
    assert len(sums) == -(-count // 64)
    first = [np.ascontiguousarray(array[:64]).data.cast("B") for array in arrays]
    assert block_checksums(first, min(count, 64)) == sums[:1]
