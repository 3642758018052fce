"""Bars for what takes more than a moment: at a terminal, on the standard error, gone when done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from mlxcache.cli.output import console

Step = Callable[[int, int], None]
"""Called with what is done and what there is to do in all, which is 0 while nobody knows."""


@contextmanager
def moving(what: str) -> Iterator[Step]:
    """A bar over bytes, with their speed."""
    with _bar(what, BarColumn(), DownloadColumn(), TransferSpeedColumn()) as step:
        yield step


@contextmanager
def counting(what: str) -> Iterator[Step]:
    """A bar over things that are counted, with the time so far; it says nothing of unknown ones."""
    with _bar(what, BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn()) as step:
        yield step


@contextmanager
def _bar(what: str, *columns: ProgressColumn) -> Iterator[Step]:
    out = console(stderr=True)
    shown = (SpinnerColumn(), TextColumn(what), *columns)
    with Progress(*shown, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task("", total=None, count="")

        def step(done: int, total: int) -> None:
            count = f"{done:,} of {total:,}" if total else ""
            bar.update(task, completed=done, total=total or None, count=count)

        yield step
