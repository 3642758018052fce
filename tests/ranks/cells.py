"""Cells of the matrix for divided models, besides those of `tests.scheduling.test_matrix`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlxcache.types import Prompt, token_ids
from tests.scheduling import test_matrix
from tests.scheduling.matrix import Checked, conversation, settled

Cell = Callable[[Checked, Path], None]


def cancelled_in_a_reply(bench: Checked, folder: Path) -> None:
    """While two others are decoded with it as one batch; all three go on afterwards."""
    talk = conversation(bench, 1)
    talks = [talk.asked(70), talk.asked(71, 36), talk.asked(72, 40)]
    tasks = [bench.send(each, tokens=24) for each in talks]
    first = tasks[0]
    bench.run(until=lambda: len(first.out) > 5 and len(bench.scheduler.lanes) == 3)
    bench.scheduler.cancel(first)
    bench.run()
    for task, each in zip(tasks, talks, strict=True):
        bench.check_words(task)
        bench.ledger.note(each, bench.held(task))
        bench.say(each.answered(task).asked(73))


def anticipated(bench: Checked, folder: Path) -> None:
    """What the next turn begins with is computed while nothing else is; the turn reuses it."""
    talk = conversation(bench, 1).asked(20)
    task = bench.say(talk)
    following = talk.answered(task).asked(21, 90)
    ids, marks = following.ids, following.marks
    idle = bench.scheduler.idle_prefill
    idle.add(Prompt(token_ids(ids), marks), task.tokens())
    while idle.ready:
        bench.tick()
        bench.check()
    assert idle.tokens > 60
    bench.ledger.note(following, ids[: marks[-1]])
    bench.say(following)
    assert idle.used == idle.tokens


def restored_as_warm(bench: Checked, folder: Path) -> None:
    """From disk the same tokens with the very same chances as from RAM."""
    disk = bench.start(folder / "store")
    talk = conversation(bench, 2).asked(20)
    bench.say(talk)
    warm = bench.say(talk)
    before = np.stack(bench.said[warm.record.id])
    settled(disk)
    bench.start(folder / "store")
    task = bench.say(talk)
    assert task.record.restored_tokens == task.record.cached_tokens > 0
    assert task.record.cached_tokens == warm.record.cached_tokens
    assert task.out == warm.out
    assert np.array_equal(before, np.stack(bench.said[task.record.id]))


def _of_the_matrix(test: Any) -> Cell:
    takes = inspect.signature(test).parameters

    def cell(bench: Checked, folder: Path) -> None:
        test(bench, folder) if "tmp_path" in takes else test(bench)

    return cell


CELLS: Mapping[str, Cell] = {
    **{
        name.removeprefix("test_"): _of_the_matrix(test)
        for name, test in vars(test_matrix).items()
        if name.startswith("test_")
    },
    "cancelled_in_a_reply": cancelled_in_a_reply,
    "anticipated": anticipated,
    "restored_as_warm": restored_as_warm,
}
"""Every cell by its name. Each takes a bench of which nothing is cached, and an empty folder."""
