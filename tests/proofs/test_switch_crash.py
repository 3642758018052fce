"""The proof that kill -9 costs nothing while models switch, and that it would notice if it did."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.proofs.pair import Conversation, Said, wrong_texts
from tests.proofs.switch_crash import MOMENTS, Proof


@pytest.mark.slow
def test_a_kill_at_each_moment_costs_nothing(tmp_path: Path) -> None:
    """Then a wrong reply shows, and so does a turn that was fed again."""
    proof = Proof(tmp_path, random.Random(3), lambda line: None, weights_bytes=200_000_000)
    # on a machine with other jobs, many kills miss their moment; they must cost nothing either
    proof.run(2 * len(MOMENTS), time.monotonic() + 600)
    assert proof.wrong == []
    assert proof.hit.total() >= len(MOMENTS) // 2, proof.struck
    assert proof.checked.after_kill > len(MOMENTS)
    assert 0 < proof.checked.durable <= proof.checked.after_kill
    paths = {"one": tmp_path / "one"}
    (talk, *_) = (one for one in proof.talks if one.model == "one")
    said = talk.said[-1]
    other = said.reply[:-1] + ("b" if said.reply.endswith("a") else "a")
    forged = Conversation("one", talk.filler, "forged")
    forged.said.append(Said(said.messages, other, said.prompt_tokens))
    assert len(wrong_texts(paths, [forged])) == 1
    forged.said[0] = Said(said.messages, said.reply, said.prompt_tokens + 1)
    assert "was counted as" in wrong_texts(paths, [forged])[0]
