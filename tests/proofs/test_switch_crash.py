"""The proof that kill -9 costs nothing while models switch, and that it would notice if it did."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from mlxcache.bench.client import Client, Refused, Reply
from mlxcache.bench.turns import Filler
from tests.conftest import ToyMaker
from tests.proofs.pair import NEW, Conversation, Said, excess, wrong_texts
from tests.proofs.switch_crash import DROPPED, FIRST, MOMENTS, READING, WRITING, Proof, struck


@pytest.mark.parametrize(
    ("printed", "doing"),
    [
        ("one: loading the weights, 250MB", {READING}),
        ("one: loading the weights, 250MB\none: loaded in 0.2 s", set()),
        ("two: loading the model for the first time\none: loaded in 0.2 s", {FIRST}),
        ("two: weights of 250MB unloaded: idle for 1 s", {DROPPED}),
        ("two: weights of 250MB unloaded: on request\none: loading the weights", {READING}),
        ("", set()),
    ],
)
def test_what_a_killed_server_was_doing_is_read_from_its_log(
    printed: str, doing: set[str], tmp_path: Path
) -> None:
    assert struck(printed, tmp_path) == doing


def test_an_unfinished_file_shows_that_a_killed_server_was_writing(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "ab"
    folder.mkdir(parents=True)
    (folder / "abc.safetensors").touch()
    assert struck("", tmp_path) == set()
    (folder / ".owner-1.tmp").touch()
    assert struck("", tmp_path) == {WRITING}


def test_tokens_fed_besides_new_ones_are_counted() -> None:
    reply = Reply("x", 0.1, 0.1, 0.1, 1000, 900, 4, None)
    assert excess(reply, 1000 - 100) == 0
    assert excess(reply, 1000 - 30) == 70 > NEW
    assert reply.conversation_tokens == 1003


def test_a_reply_that_was_cut_off_is_no_turn(
    toy: ToyMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no counts. The same message is sent again."""
    replies = iter(
        [
            Reply("ab", 0.1, 0.1, 0.1, None, None, 2, None),
            Reply("abc", 0.1, 0.1, 0.1, 30, 0, 3, None),
        ]
    )
    monkeypatch.setattr(Client, "chat", lambda *_: next(replies))
    talk = Conversation("one", Filler(toy("llama")), "one 1")
    with pytest.raises(Refused):
        talk.ask(Client(1, ""), 20, 3)
    asked = list(talk.messages)
    talk.ask(Client(1, ""), 20, 3)
    assert talk.messages == [*asked, {"role": "assistant", "content": "abc"}]
    assert [one.prompt_tokens for one in talk.said] == [30]


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
