"""Which models can be divided, where a process is in its group, and when a rank counts as lost."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from mlx import nn
from mlx_lm.utils import load_model

from mlxcache.config import Settings
from mlxcache.errors import GroupLost, ModelError
from mlxcache.model import kv
from mlxcache.model.load import ModelSpec, load
from mlxcache.ranks import group
from mlxcache.ranks import operations as op
from mlxcache.ranks.group import (
    Meeting,
    Place,
    Share,
    Watch,
    check_divisible,
    place_from,
    share_of,
    united,
)
from mlxcache.ranks.leader import Leader
from mlxcache.residency.memory import plan_memory
from mlxcache.store.parts import Mode, PartName, other_parts, read_part_name
from tests.conftest import ToyMaker


@dataclass
class Member:
    """A process of a group of two, without MLX's links."""

    place: int
    met: Future[Meeting]

    def rank(self) -> int:
        return self.place

    def size(self) -> int:
        return 2


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> tuple[Member, Member]:
    """Two processes that have agreed where to meet as soon as rank 0 knows."""

    def agree(member: Member, mine: Meeting | None) -> Meeting:
        if mine is not None:
            member.met.set_result(mine)
        return member.met.result(20)

    monkeypatch.setattr(group, "agree_on_meeting", agree)
    met: Future[Meeting] = Future()
    return Member(0, met), Member(1, met)


def test_ranks_meet_beside_a_stranger_who_says_nothing(members: tuple[Member, Member]):
    """One that only connects, and one that says something else."""
    with ThreadPoolExecutor(1) as pool, ExitStack() as strangers:
        accepted = pool.submit(group.accept_all, "127.0.0.1", members[0])
        port = members[1].met.result(20).port
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            stranger = socket.create_connection(("127.0.0.1", port))
            strangers.enter_context(stranger).sendall(words)
        links = group.connect("127.0.0.1", members[1])
        (found,) = accepted.result(20)
        links.questions.send_bytes(b"hello")
        assert found.questions.recv_bytes() == b"hello"
        links.close()
        found.close()


def test_ranks_that_do_not_connect_are_named(
    members: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
):
    """Also beside a stranger."""
    monkeypatch.setattr(group, "CONNECT_S", 0.2)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(group.accept_all, "127.0.0.1", members[0])
        with (
            socket.create_connection(("127.0.0.1", members[1].met.result(20).port)),
            pytest.raises(GroupLost, match=r"ranks \[1\] did not connect within 0\.2 s"),
        ):
            accepted.result(20)


class Undivided(nn.Module):
    """A model that mlx-lm divides in no way."""


@pytest.mark.parametrize(
    ("mode", "size", "words"),
    [("tensor", 3, "num_attention_heads = 4.*number of ranks"), ("pipeline", 5, "too few for 5")],
)
def test_a_model_that_does_not_divide_evenly_is_refused(
    toy: ToyMaker, mode: Mode, size: int, words: str
):
    """With the figure at fault, before any weight is read."""
    model, config = load_model(toy("qwen3_5"), lazy=True)
    check_divisible(model, config, 2, mode)
    with pytest.raises(ModelError, match=words):
        check_divisible(model, config, size, mode)


def test_output_groups_that_do_not_divide_evenly_are_refused(toy: ToyMaker):
    """Those of DeepSeek V4.1's attention, though its heads would divide."""
    model, config = load_model(toy("deepseek_v41", heads=4, kv_heads=4), lazy=True)
    check_divisible(model, config, 2, "tensor")
    with pytest.raises(ModelError, match="o_groups = 2, which 4 ranks cannot divide evenly"):
        check_divisible(model, config, 4, "tensor")


@pytest.mark.parametrize(("mode", "words"), [("tensor", "--pipeline"), ("pipeline", "leave out")])
def test_a_family_that_mlx_lm_does_not_divide_is_refused_by_name(mode: Mode, words: str):
    """With the other way to divide it."""
    with pytest.raises(ModelError, match=f"mamba2.*{words}"):
        check_divisible(Undivided(), {"model_type": "mamba2"}, 2, mode)


def test_a_pipeline_whose_ranks_share_kv_is_refused_by_name(toy: ToyMaker):
    """Its layers would be restored without the KV that they use of others."""
    model, config = load_model(toy("deepseek_v41"), lazy=True)
    check_divisible(model, config, 2, "tensor")
    with pytest.raises(ModelError, match=r"pipeline of deepseek_v41.*leave out --pipeline"):
        check_divisible(model, config, 2, "pipeline")


def test_the_place_is_read_from_what_mlx_launch_sets(tmp_path: Path):
    """The host of rank 0 from the file of the ring, or from the variables of JACCL and NCCL."""
    file = tmp_path / "hosts.json"
    file.write_text(json.dumps([["10.0.0.1:32323"], ["10.0.0.2:32324"]]))
    ring = {"MLX_RANK": "1", "MLX_HOSTFILE": str(file)}
    assert place_from(ring) == Place(1, "10.0.0.1")
    assert place_from(ring, pipeline=True) == Place(1, "10.0.0.1", "pipeline")
    jaccl = {"MLX_RANK": "0", "MLX_JACCL_COORDINATOR": "10.0.0.3:32323"}
    assert place_from(jaccl) == Place(0, "10.0.0.3")
    assert place_from({"MLX_RANK": "0", "NCCL_HOST_IP": "10.0.0.4"}) == Place(0, "10.0.0.4")


def test_a_process_that_runs_alone_has_no_place(tmp_path: Path):
    """Neither without mlx.launch, nor as its only process."""
    assert place_from({}) is None
    file = tmp_path / "hosts.json"
    file.write_text("\n")
    assert place_from({"MLX_RANK": "0", "MLX_HOSTFILE": str(file)}) is None


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_hostfile_that_cannot_be_read_is_named(tmp_path: Path, content: str | None):
    """And a rank without hosts is told to use mlx.launch."""
    file = tmp_path / "hosts.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ModelError, match=r"hosts\.json"):
        place_from({"MLX_RANK": "0", "MLX_HOSTFILE": str(file)})
    with pytest.raises(ModelError, match=r"mlx\.launch"):
        place_from({"MLX_RANK": "0"})


def test_each_rank_has_a_namespace_of_its_own():
    """It differs by mode, rank and number of ranks."""
    modes: Sequence[Mode] = ("tensor", "pipeline")
    parts = [PartName("n", m, r, s) for m in modes for s in (2, 4) for r in range(s)]
    assert len({part.namespace for part in parts}) == 12
    assert [read_part_name(part.namespace) for part in parts] == parts
    assert read_part_name("n") is None
    assert other_parts("n") == []
    assert other_parts("n.tensor.0of3") == ["n.tensor.1of3", "n.tensor.2of3"]


def test_the_layout_is_that_of_all_ranks_together(toy_llama: Path):
    """The most bytes; checkpoints if one rank needs them; nothing cached if a class is unknown."""
    layout = kv.survey(load_model(toy_llama)[0])
    share = share_of(layout, 100)
    larger = Share(None, 10**9, 7, 8, 100, True, True, False, ["Odd"])
    both = united(layout, [share, larger])
    assert (both.bytes_per_token, both.checkpoint_bytes, both.running_bytes) == (10**9, 7, 8)
    assert both.opaque
    assert not both.batchable
    assert both.unknown == ("Odd",)
    assert both.divided
    assert not both.rewinds
    assert united(layout, [share]) == replace(layout, divided=True)


def test_ranks_of_which_only_some_have_attention_are_refused(toy_llama: Path):
    """Their prefixes could not be compared."""
    layout = kv.survey(load_model(toy_llama)[0])
    with pytest.raises(ModelError, match="fewer ranks"):
        united(layout, [Share(runs=False)])


class Asked(Leader):
    """A leader whose other rank answers `answers` in turn; an error is raised."""

    def __init__(self, answers: Sequence[op.Answer | GroupLost]):
        super().__init__(None, [], [])
        self._answers_left = list(answers)

    def ping(self) -> list[op.Answer]:
        answer = self._answers_left.pop(0)
        if isinstance(answer, GroupLost):
            raise answer
        return [answer]


@pytest.mark.parametrize(
    ("last", "own_age", "words"),
    [
        (GroupLost("rank 1 did not answer"), 0.0, "rank 1 did not answer"),
        (op.Answer(age_s=61.0), 0.0, "61 s"),
        (op.Answer(), 70.0, "70 s"),
    ],
)
def test_a_rank_that_is_silent_or_stuck_is_lost(last: Any, own_age: float, words: str):
    """Rank 0 itself counts too: it may wait for another one in a pass."""
    heard, told = threading.Event(), []
    ages = iter([0.0])

    def note(why: str) -> None:
        told.append(why)
        heard.set()

    first = op.Answer(age_s=2.0)
    watch = Watch(Asked([first, last]), lambda: next(ages, own_age), note, every_s=0.01)
    assert heard.wait(5)
    (figures,) = watch.figures()
    assert figures["rank"] == 1
    assert figures["operation_s"] in {2.0, 61.0, 0.0}
    assert 0.0 <= figures["silent_s"] < 5.0
    assert len(told) == 1
    assert words in told[0]
    watch.close()


def test_the_rank_with_the_least_memory_decides_the_budget(
    toy_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """And a budget that fits on all ranks is not changed."""
    loaded = load(ModelSpec(str(toy_llama)))
    layout = kv.survey(loaded.model)
    settings = Settings(model=str(toy_llama), ram="300MB", cache_dir=tmp_path)
    plan = plan_memory(loaded, layout, settings, None, 200_000_000)
    assert plan.budget.limit == 200_000_000
    assert "limited to 200 MB by another rank" in caplog.text
    assert plan_memory(loaded, layout, settings, None, 400_000_000).budget.limit == 300_000_000
