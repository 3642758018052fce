"""A part of what `python -m tests.proofs.walls` plays."""

from __future__ import annotations

import pytest

from tests.proofs.walls import ACCOUNTS, play


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
async def test_an_exception_in_any_function_fails_its_own_request_alone(family, tmp_path):
    """Others get their tokens, no memory is lost, and what follows is warm."""
    results = await play(family, tmp_path, share=0.005)
    assert len(results) > 5
    assert not [one for one in results if one.wrong and not one.place.startswith(ACCOUNTS)]
