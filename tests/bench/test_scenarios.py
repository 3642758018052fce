"""Messages that each scenario sends, recorded by a fake client."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mlxcache.bench.client import Reply
from mlxcache.bench.turns import AGAIN, PARTING, SCENARIOS, Filler, Visit
from tests.toys.tokenizer import toy_tokenizer

Said = list[tuple[str, str]]


@dataclass
class Memo:
    """Answers everything with its own number, and keeps what it was sent."""

    sent: list[Said] = field(default_factory=list)

    @property
    def client(self) -> Memo:
        return self

    def chat(self, messages: Sequence[Mapping[str, Any]], max_tokens: int) -> Reply:
        self.sent.append([(m["role"], m["content"]) for m in messages])
        return Reply(f"reply {len(self.sent)}", 0.1, 0.2, 0.3, 10, 5, max_tokens, None)


class Words:
    """Text that says what it is, in two lines."""

    def text(self, tokens: int, seed: str) -> str:
        return f"{tokens} of\n{seed}"


@pytest.fixture
def memo() -> Memo:
    return Memo()


@pytest.fixture
def visit(memo: Memo) -> Visit:
    return Visit(memo, Words(), 800, 4, "s")  # type: ignore[arg-type]


def shared(one: Said, two: Said) -> int:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))
    return len(list(same))


def test_a_warm_turn_adds_to_the_cold_one(visit: Visit, memo: Memo) -> None:
    SCENARIOS["cold"](visit)
    SCENARIOS["warm"](visit)
    cold, warm = memo.sent
    assert warm[:3] == [*cold, ("assistant", "reply 1")]
    assert len(warm) == 4


def test_an_edit_replaces_the_last_message_only(visit: Visit, memo: Memo) -> None:
    SCENARIOS["edited"](visit)
    SCENARIOS["edited"](visit)
    _, said, once, twice = memo.sent
    assert [shared(said, once), shared(said, twice), shared(once, twice)] == [3, 3, 3]
    assert [len(said), len(once), len(twice)] == [4, 4, 4]


def test_the_attribution_line_is_all_that_changes(visit: Visit, memo: Memo) -> None:
    SCENARIOS["attribution"](visit)
    (_, first), (_, second) = memo.sent[0][0], memo.sent[1][0]
    assert first.startswith("x-anthropic-billing-header: ")
    assert first.partition("\n")[0] != second.partition("\n")[0]
    assert first.partition("\n")[2] == second.partition("\n")[2]
    assert memo.sent[1][1:3] == [memo.sent[0][1], ("assistant", "reply 1")]


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_scenario_can_be_played_alone(name: str, visit: Visit) -> None:
    assert SCENARIOS[name](visit).replies


@pytest.mark.parametrize("name", AGAIN)
def test_played_again_a_scenario_says_something_new(name: str, visit: Visit, memo: Memo) -> None:
    """So that a kept conversation is as warm the ninth time as the second, and no warmer."""
    SCENARIOS[name](visit)
    before = [tuple(said) for said in memo.sent]
    SCENARIOS[name](visit)
    assert not set(before) & {tuple(said) for said in memo.sent[len(before) :]}


def test_branches_go_off_from_within_one_message_of_a_grown_conversation(visit, memo):
    for name in PARTING:
        SCENARIOS[name](visit)
    grown, branch, again = memo.sent[5], memo.sent[8], memo.sent[9]
    assert len(grown) == 12
    assert shared(grown, branch) == shared(grown, again) == shared(branch, again) == 5
    assert len(branch) == len(again) == 6
    texts = [said[5][1].splitlines() for said in (grown, branch, again)]
    assert texts[0][0] == texts[1][0] == texts[2][0]
    assert len({text[-1] for text in texts}) == 3


def test_text_has_the_tokens_asked_for_and_follows_from_its_seed(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(toy_tokenizer(512, False), encoding="utf-8")
    filler, tokenizer = Filler(tmp_path), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for tokens in (1, 34, 500):
        text = filler.text(tokens, "one")
        assert len(tokenizer.encode(text, add_special_tokens=False)) == tokens
        assert text == Filler(tmp_path).text(tokens, "one")
    one, two = (tokenizer.encode(filler.text(64, seed)).ids for seed in ("one", "two"))
    assert one[:8] != two[:8]
