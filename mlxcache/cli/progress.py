"""Progress bars, shown at a terminal and removed when done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from mlxcache.cli.output import console

Step = Callable[[int, int], None]
"""Called with the amount done and the total, which is 0 while it is unknown."""

_TENTH = 0.1


@contextmanager
def byte_bar(what: str) -> Iterator[Step]:
    """Show a bar over bytes, with their speed, on the standard error."""
    with _bar(what, BarColumn(), DownloadColumn(), TransferSpeedColumn()) as step:
        yield step


@contextmanager
def count_bar(what: str) -> Iterator[Step]:
    """Show a bar over a count, with the time so far, on the standard error."""
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


class Loading:
    """A bar over the steps of loading a model: call it with a step's name and the part done.

    The part is from 0 to 1, or None if unknown. May be called from any thread.
    """

    def __init__(self, console: Console):
        self._console = console
        self._shown: tuple[str, int] | None = None
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def __call__(self, what: str, share: float | None) -> None:
        """Show one step; without a terminal as a line, at most one per tenth."""
        if self._console.is_terminal:
            total = None if share is None else 1.0
            self._bar.update(self._task, description=what, total=total, completed=share or 0.0)
            return
        step = (what, 0 if share is None else int(share / _TENTH))
        if step != self._shown:
            self._shown = step
            percent = "" if share is None else f" {share:.0%}"
            self._console.print(f"{what}{percent}")
