"""Progress bars, shown on a terminal only and removed when done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from mlxcache.cli.output import console
from mlxcache.config import format_size

Step = Callable[[int, int], None]
"""Function that is called with the amount done and the total, which is 0 while unknown.

The unit is bytes, tokens or files."""

_TENTH = 0.1


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{format_size(int(speed))}/s" if speed else "")


@contextmanager
def byte_bar(what: str, *, shown: bool = True) -> Iterator[Step]:
    """Show a bar of bytes and their speed on standard error, if it is a terminal.

    Yields a function to update it.
    """
    with _bar(what, format_size, _Speed(), shown) as step:
        yield step


@contextmanager
def count_bar(what: str, *, shown: bool = True) -> Iterator[Step]:
    """Show a bar of a count and the time passed on standard error, if it is a terminal.

    Yields a function to update it.
    """
    with _bar(what, "{:,}".format, TimeElapsedColumn(), shown) as step:
        yield step


@contextmanager
def _bar(
    what: str, format: Callable[[int], str], last: ProgressColumn, shown: bool
) -> Iterator[Step]:
    out = console(stderr=True)
    count = TextColumn("{task.fields[count]}")
    columns = (SpinnerColumn(), TextColumn(what), BarColumn(), count, last)
    with _progress(out, *columns, shown=shown) as bar:
        task = bar.add_task("", total=None, count="")

        def step(done: int, total: int) -> None:
            count = f"{format(done)} of {format(total)}" if total else ""
            bar.update(task, completed=done, total=total or None, count=count)

        yield step


@contextmanager
def loading_bar(console: Console) -> Iterator[Callable[[str, float | None], None]]:
    """Show the progress of loading a model on `console`; yield a function to update it.

    It takes the name of a step and the fraction done, None if unknown. Any thread may call it.
    Without a terminal, a line is printed for each tenth of each step.
    """
    shown: tuple[str, int] | None = None
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with _progress(console, *columns) as bar:
        task = bar.add_task("starting", total=None)

        def step(what: str, share: float | None) -> None:
            nonlocal shown
            if console.is_terminal:
                total = None if share is None else 1.0
                bar.update(task, description=what, total=total, completed=share or 0.0)
                return
            now = (what, 0 if share is None else int(share / _TENTH))
            if now != shown:
                shown = now
                console.print(what if share is None else f"{what} {share:.0%}")

        yield step


def _progress(console: Console, *columns: ProgressColumn, shown: bool = True) -> Progress:
    shown = shown and console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=not shown)
