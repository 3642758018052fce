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
from mlxcache.bench.turns import AGAIN, CROWD, PARTING, SCENARIOS, Filler, Visit
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
    """What was sent."""
    return Memo()


@pytest.fixture
def visit(memo: Memo) -> Visit:
    """A first repetition."""
    return Visit(memo, Words(), 800, 4, "s")  # type: ignore[arg-type]


def shared(one: Said, two: Said) -> int:
    """Leading messages in common."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))
    return len(list(same))


def test_a_warm_turn_adds_to_the_cold_one(visit: Visit, memo: Memo) -> None:
    """All that was sent and answered before comes first, unchanged."""
    SCENARIOS["cold"](visit)
    SCENARIOS["warm"](visit)
    cold, warm = memo.sent
    assert warm[:3] == [*cold, ("assistant", "reply 1")]
    assert len(warm) == 4


def test_an_edit_replaces_the_last_message_only(visit: Visit, memo: Memo) -> None:
    """Each edit is one of the same conversation, as it was."""
    SCENARIOS["edited"](visit)
    SCENARIOS["edited"](visit)
    _, said, once, twice = memo.sent
    assert [shared(said, once), shared(said, twice), shared(once, twice)] == [3, 3, 3]
    assert [len(said), len(once), len(twice)] == [4, 4, 4]


def test_nothing_else_is_said_in_the_conversation_that_is_measured_warm(
    visit: Visit, memo: Memo
) -> None:
    """So that with kept conversations a warm turn always adds to the one before."""
    for name in ("cold", "warm", "second", "edited", "in_turn"):
        SCENARIOS[name](visit)
    main = [said for said in memo.sent if said[1] == memo.sent[0][1]]
    assert len(main) == 4
    assert all(shared(one, two) == len(one) for one, two in itertools.pairwise(main))


def test_a_second_conversation_shares_the_system_prompt_alone(visit: Visit, memo: Memo) -> None:
    """Its own first message differs at once."""
    SCENARIOS["second"](visit)
    assert shared(*memo.sent) == 1


def test_the_attribution_line_is_all_that_changes(visit: Visit, memo: Memo) -> None:
    """The system prompt's other lines stay, and so does the history."""
    SCENARIOS["attribution"](visit)
    (_, first), (_, second) = memo.sent[0][0], memo.sent[1][0]
    assert first.startswith("x-anthropic-billing-header: ")
    assert first.partition("\n")[0] != second.partition("\n")[0]
    assert first.partition("\n")[2] == second.partition("\n")[2]
    assert memo.sent[1][1:3] == [memo.sent[0][1], ("assistant", "reply 1")]


def test_two_conversations_take_turns(visit: Visit, memo: Memo) -> None:
    """Four turns are measured; the two that begin the conversations are not."""
    outcome = SCENARIOS["in_turn"](visit)
    assert (len(outcome.replies), len(memo.sent)) == (4, 6)
    assert outcome.wall_s == pytest.approx(1.2)
    ends = memo.sent[2:]
    assert shared(ends[0], ends[1]) == 1
    assert shared(ends[0], ends[2]) == len(ends[0])


def test_eight_at_once_have_nothing_in_common(visit: Visit, memo: Memo) -> None:
    """Then each goes on with its own."""
    SCENARIOS["concurrent"](visit)
    assert len({said[0] for said in memo.sent}) == len(CROWD) == len(memo.sent)
    assert len(SCENARIOS["concurrent_warm"](visit).replies) == len(CROWD)
    assert all(len(said) == 4 for said in memo.sent[len(CROWD) :])


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_scenario_can_be_played_alone(name: str, visit: Visit) -> None:
    """It begins the conversations it needs."""
    assert SCENARIOS[name](visit).replies


@pytest.mark.parametrize("name", AGAIN)
def test_played_again_a_scenario_says_something_new(name: str, visit: Visit, memo: Memo) -> None:
    """So that a kept conversation is as warm the ninth time as the second, and no warmer."""
    SCENARIOS[name](visit)
    before = [tuple(said) for said in memo.sent]
    SCENARIOS[name](visit)
    assert not set(before) & {tuple(said) for said in memo.sent[len(before) :]}


def test_branches_go_off_from_within_one_message_of_a_grown_conversation(
    visit: Visit, memo: Memo
) -> None:
    """Half of that message is the same, and the first branch and the second part at its middle."""
    for name in PARTING:
        SCENARIOS[name](visit)
    grown, branch, again = memo.sent[5], memo.sent[8], memo.sent[9]
    assert len(grown) == 12
    assert shared(grown, branch) == shared(grown, again) == shared(branch, again) == 5
    assert len(branch) == len(again) == 6
    texts = [said[5][1].splitlines() for said in (grown, branch, again)]
    assert texts[0][0] == texts[1][0] == texts[2][0]
    assert len({text[-1] for text in texts}) == 3


def test_a_grown_conversation_is_edited_regenerated_and_gone_on_with(
    visit: Visit, memo: Memo
) -> None:
    """Nothing of what parts from it is kept in it."""
    for name in PARTING:
        SCENARIOS[name](visit)
    grown, edited, regenerated, returned = (memo.sent[at] for at in (5, 6, 7, 10))
    assert len(edited) == len(grown)
    assert shared(grown, edited) == len(grown) - 1
    assert regenerated == grown
    assert len(returned) == len(grown) + 2
    assert shared(grown, returned) == len(grown)


def test_a_second_branch_alone_has_a_first_one_before_it(visit: Visit, memo: Memo) -> None:
    """So that its figure is the second's, whatever else is played."""
    SCENARIOS["branched_again"](visit)
    assert len(memo.sent) == 8


def test_text_has_the_tokens_asked_for_and_follows_from_its_seed(tmp_path: Path) -> None:
    """The same seed gives the same text, another one parts from it within a few tokens."""
    (tmp_path / "tokenizer.json").write_text(toy_tokenizer(512, False), encoding="utf-8")
    filler, tokenizer = Filler(tmp_path), Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for tokens in (1, 34, 500):
        text = filler.text(tokens, "one")
        assert len(tokenizer.encode(text, add_special_tokens=False)) == tokens
        assert text == Filler(tmp_path).text(tokens, "one")
    one, two = (tokenizer.encode(filler.text(64, seed)).ids for seed in ("one", "two"))
    assert one[:8] != two[:8]
