"""Every family, in every way in which a client comes back: right, and as warm as is promised."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from mlxcache.scheduling.lanes import Lane
from tests.conftest import ToyMaker
from tests.scheduling.matrix import (
    GENERATION,
    HEAD,
    Family,
    Logprobs,
    Switches,
    conversation,
    settled,
    shared,
)
from tests.toys.configs import COMPRESSED, FAMILIES, SEEING, UNBATCHED, VLM, toy_options
from tests.toys.toy import FUSED

NAMES = (*FAMILIES, *VLM, *SEEING)
LAYERS = {"gemma4": 4, "llama4": 4}
"""Layers of families that need more than two to have each of their kinds."""


QUANTISED = ("llama", "gemma3", "gpt_oss", "qwen3_5", "deepseek_v3")
"""Families that run with `--kv-bits` too: attention, windows, states, and latents."""

Mode = Switches | int
"""What is done to a family: another model takes turns with it, or its KV is in so many bits."""


def modes(name: str) -> Iterator[Mode]:
    yield from get_args(Switches)
    if name in QUANTISED:
        yield from (8,) if name == "deepseek_v3" else (8, 4)


def cells(quick: Collection[str], also: Collection[tuple[str, Mode]] = ()) -> pytest.MarkDecorator:
    """Let a test run on each family in each of its `modes`.

    In the quick suite too: the families `quick` as they are, and the pairs `also`.
    """
    quickly = {*((name, "none") for name in quick), *also}
    params = [
        pytest.param(
            (name, mode),
            id=name if mode == "none" else f"{name}-{mode}",
            marks=() if (name, mode) in quickly else pytest.mark.slow,
        )
        for name in NAMES
        for mode in modes(name)
    ]
    return pytest.mark.parametrize("made", params, indirect=True, scope="module")


often = cells(
    [name for name in NAMES if name not in COMPRESSED],
    [
        *(("llama", "cleared"), ("qwen3_5", "cleared"), ("qwen3_5", "kept")),
        *(("llama", 4), ("qwen3_5", 8), ("deepseek_v3", 8)),
    ],
)
"""For what shows a wrong cache of any kind of layer."""

seldom = cells(["llama", "gemma3", "llama4", "qwen3_5", "mamba"])
"""For what other families have in common with one of each kind."""


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, int | None], dict[tuple[int, ...], Logprobs]]:
    """Cold log-probabilities of each family and bits, which are the same whatever switches."""
    return defaultdict(dict)


@pytest.fixture(scope="module")
def made(
    request: pytest.FixtureRequest,
    toy: ToyMaker,
    known: dict[tuple[str, int | None], dict[tuple[int, ...], Logprobs]],
) -> Family:
    name, mode = request.param
    switches: Switches = "none" if isinstance(mode, int) else mode
    bits = mode if isinstance(mode, int) else None
    path = toy(**toy_options(name), layers=LAYERS.get(name, 2), window=32, **FUSED)
    other = None if switches == "none" else toy("llama", layers=2)
    return Family(name, path, switches, other, known[name, bits], kv_bits=bits)


@pytest.fixture
def family(made: Family, tmp_path: Path) -> Iterator[Family]:
    """A family of which nothing is cached."""
    made.fresh()
    if made.switches == "cleared":
        made.start(tmp_path / "first")
    yield made
    made.close()


@seldom
def test_the_same_prompt_again(family: Family) -> None:
    talk = conversation(family, 1).asked(20)
    first = family.say(talk)
    assert family.say(talk).out == first.out


@seldom
def test_the_next_turn(family: Family) -> None:
    conversation(family, 3)


@seldom
def test_an_edited_last_message(family: Family) -> None:
    talk = conversation(family, 1).asked(20)
    family.say(talk)
    family.say(talk.edited(-1, 21))
    family.say(talk.edited(-1, 22))


@seldom
def test_an_edited_message_in_the_middle(family: Family) -> None:
    talk = conversation(family, 3)
    family.say(talk.edited(2, 21))
    family.say(talk.edited(2, 22))


@often
def test_a_branch_at_any_token(family: Family) -> None:
    """Inside the head, a message and a reply, and one token before the end; twice each."""
    talk = conversation(family, 2)
    for at in (HEAD - 19, HEAD + 11, talk.marks[1] + 7, talk.marks[-1] - 1):
        for seed in (30, 31):
            family.say(talk.parted(at, seed))


@seldom
def test_two_branches_in_turn(family: Family) -> None:
    """Each goes on while the other does, as two agents on one prefix."""
    talk = conversation(family, 2)
    one, other = talk.asked(40), talk.asked(41)
    for turn in range(2):
        one = one.answered(family.say(one)).asked(50 + turn)
        other = other.answered(family.say(other)).asked(60 + turn)


@seldom
def test_cancelled_in_prefill(family: Family) -> None:
    """What was computed until then is there for whoever comes next."""
    talk = conversation(family, 1).asked(20, 150).asked(21, 80)
    task = family.send(talk)
    family.run(until=lambda: task.lease is not None and task.held.lineage.length > 180)
    done = task.held.lineage.length
    family.scheduler.cancel(task)
    assert not task.out
    family.ledger.note(talk, talk.ids[:done])
    family.say(talk)


@often
def test_batched_with_others_of_other_lengths(family: Family) -> None:
    """They start warm, decode as one batch, and each is warm afterwards."""
    talk = conversation(family, 2)
    talks = [talk.asked(70), talk.asked(71, 36), talk.asked(74, 21), talk.upto(2).asked(72, 70)]
    tasks = [family.send(each) for each in talks]
    lanes: list[Lane] = []

    def noted() -> bool:
        lanes.extend(family.scheduler.lanes.all)
        if family.switches == "cleared" and not all(task.out for task in tasks):
            family.await_disk(0.2)  # else replies end before the last one is restored
        return False

    family.run(until=noted)
    most = max(len(lane.decoder.rows) for lane in lanes)
    assert most == (1 if family.name in UNBATCHED else 4)
    for task, each in zip(tasks, talks, strict=True):
        family.check_words(task)
        assert task.record.cached_tokens > HEAD
        family.ledger.note(each, family.held(task))
    for task, each in zip(tasks, talks, strict=True):
        family.say(each.answered(task).asked(73))


@seldom
def test_evicted_and_restored_from_disk(family: Family, tmp_path: Path) -> None:
    disk = family.start(tmp_path / "store")
    talk = conversation(family, 3)
    settled(disk)
    family.kv.ram.clear()
    task = family.say(talk.asked(20))
    assert task.record.restored_tokens == task.record.cached_tokens
    settled(disk)
    family.kv.ram.clear()
    family.say(talk.asked(20).edited(-1, 21))


@often
def test_restarted(family: Family, tmp_path: Path) -> None:
    """The next turn, an edited message and a branch, each by a new process.

    Of turns that follow at once, the disk gets not all states of windows.
    """
    disk = family.start(tmp_path / "store")
    talk = conversation(family, 3, partial(settled, disk)).asked(20)
    following = talk.answered(family.say(talk)).asked(22)
    branches = [talk.parted(talk.marks[5] - 7, seed) for seed in (24, 25)]
    if not family.kv.layout.specs:  # with no KV on disk, nobody can tell where prompts parted
        branches = branches[:1]
    for again in (following, talk.edited(-1, 23), *branches):
        settled(disk)
        disk = family.start(tmp_path / "store")
        task = family.say(again)
        assert task.record.restored_tokens == task.record.cached_tokens > 0


@seldom
def test_forked(family: Family) -> None:
    """Two conversations go on from one leaf, and the first goes on where it was."""
    talk = conversation(family, 2)
    fork = talk.asked(80)
    task = family.say(fork)
    main = talk.asked(81)
    family.say(main.answered(family.say(main)).asked(82))
    family.say(fork.answered(task).asked(83))
    assert shared(fork.ids, main.ids) == len(talk.ids) - len(GENERATION)
