"""`mlxcache doctor`: check this machine, its settings and a model for what slows a server."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxcache.cli.connect import base_url
from mlxcache.cli.doctor import clients, disk, machine, serving
from mlxcache.cli.doctor.finding import Finding, worst
from mlxcache.cli.options import Config, Flags, with_settings
from mlxcache.cli.output import reporting
from mlxcache.cli.progress import byte_bar, count_bar
from mlxcache.cli.show import print_json
from mlxcache.cli.target import CacheDir, Json
from mlxcache.config import Settings, disk_limit, format_size, load_settings, ram_limit
from mlxcache.errors import ModelError

WIDTH = 80
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}

Quick = Annotated[
    bool, typer.Option("--quick", metavar="", help="Leave out the test of the disk's speed.")
]


@with_settings(
    "adapter", "draft_model", "kv_bits", "ram", "disk", "host", "port", "trust_remote_code"
)
def doctor(
    *,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|HUB_ID",
            help="Show how this model caches, what conversations cost, and how many fit.",
        ),
    ] = None,
    flags: Flags,
    config: Config = None,
    cache_dir: CacheDir = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Check this machine, its settings and, with --model, a model.

    Needs no server. Each WARN and FAIL comes with a remedy; exit status 1 if a check fails.
    """
    with reporting():
        given = {"model": model, "cache_dir": cache_dir, **flags}
        settings = load_settings(given, os.environ, config)
        found = Examination(settings)
        found.run(quick=quick, shown=not as_json)
    if as_json:
        print_json(found.as_object())
    else:
        found.show()
    if worst(found.findings) == "fail":
        raise typer.Exit(1)


class Examination:
    """All checks of one run. `findings` are in the order in which they are shown.

    `model` and `fit` are None without a model, or if it cannot be examined.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.findings: list[Finding] = []
        self.model: Any = None
        self.fit: Any = None

    def run(self, *, quick: bool, shown: bool) -> None:
        """Run all checks; blocks for seconds. `quick` omits the disk's speed.

        With `shown`, slow checks show their progress on standard error.
        """
        settings = self.settings
        url = base_url(settings.host, settings.port)
        self._add(machine.examine_versions())
        with count_bar("examining the machine and the model") if shown else nullcontext():
            self._machine()
        self._add(machine.examine_files())
        self._add(disk.examine_folder(settings.cache_dir))
        if self.findings[-1].status != "fail":
            self._add(disk.examine_room(settings.cache_dir, settings.disk))
            if not quick:
                with byte_bar("testing the disk") if shown else nullcontext(_nothing) as step:
                    self._add(disk.examine_speed(settings.cache_dir, step))
        self._add(serving.examine_port(settings, url))
        self._add(*serving.examine_servers(settings, url))
        self._add(*clients.examine_clients(os.environ, Path.home(), url, settings.rules))

    def _add(self, *findings: Finding | None) -> None:
        self.findings += [one for one in findings if one is not None]

    def _machine(self) -> None:
        try:
            host = machine.host()
        except ImportError as error:
            remedy = "reinstall mlxcache: pip install --force-reinstall mlxcache"
            self._add(Finding("MLX", "fail", f"cannot be imported: {error}", remedy))
            return
        self._add(machine.examine_system(host))
        weights, whose = self._model(host)
        ram = self._ram(host, weights)
        self._add(
            machine.examine_memory(host, ram, weights, whose),
            machine.examine_metal(host, ram, weights),
            machine.examine_blas(host),
        )

    def _ram(self, host: machine.Host, weights: int) -> int:
        return ram_limit(
            self.settings.ram,
            machine_bytes=host.total,
            working_set_bytes=host.working_set,
            weights_bytes=weights,
        )

    def _model(self, host: machine.Host) -> tuple[int, str]:
        """Examine the model. Returns the bytes of its weights, and words that qualify them."""
        settings = self.settings
        if settings.model is None:
            return 0, "the model's"
        # Here and not above: mlx-lm takes seconds to import.
        from mlxcache.cache.capacity import fit  # noqa: PLC0415
        from mlxcache.cli.doctor.model import TOKENS, examine_fit  # noqa: PLC0415
        from mlxcache.model.examine import examine  # noqa: PLC0415
        from mlxcache.model.load import ModelSpec  # noqa: PLC0415

        spec = ModelSpec(
            settings.model,
            adapter=settings.adapter,
            trust_remote_code=settings.trust_remote_code,
            context=settings.context,
            draft=settings.draft_model,
        )
        try:
            self.model = examine(spec, settings.kv_bits)
        except ModelError as error:
            self._add(Finding("model", "fail", str(error)))
            return 0, "the model's"
        weights = self.model.info.weights_bytes
        self.fit = fit(
            self.model.layout,
            ram=self._ram(host, weights),
            disk=disk_limit(settings.disk, settings.cache_dir / "store"),
            tokens=sorted({min(n, self.model.info.context_length) for n in TOKENS}),
        )
        self._add(*examine_fit(self.model, self.fit))
        return weights, f"the model's {format_size(weights)} of"

    def as_object(self) -> dict[str, Any]:
        """Return the JSON object of all findings and of the model."""
        found: dict[str, Any] = {
            "object": "doctor",
            "status": worst(self.findings),
            "findings": [one.as_object() for one in self.findings],
        }
        if self.model is not None:
            from mlxcache.cli.doctor.model import as_object  # noqa: PLC0415 - as above

            found["model"] = as_object(self.model, self.fit)
        return found

    def show(self) -> None:
        """Print the findings, each with its remedy, and the tables of the model."""
        console = Console(highlight=False, markup=False)
        if not console.is_terminal or console.width > WIDTH:
            console = Console(highlight=False, markup=False, width=WIDTH)
        print_findings(console, self.findings)
        if self.model is not None:
            _show_model(console, self.model, self.fit)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print findings; a remedy stays on one line, so that its command can be copied."""
    widest = max((len(one.name) for one in findings), default=0)
    for one in findings:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True, width=max(map(len, _STYLES)))
        table.add_column(no_wrap=True, width=widest)
        table.add_column(overflow="fold")
        table.add_row(Text(one.status.upper(), _STYLES[one.status]), one.name, one.value)
        console.print(table)
        if one.remedy is not None:
            console.print(Text(f"      {one.remedy}", "cyan"), soft_wrap=True)


def _show_model(console: Console, model: Any, fit: Any) -> None:
    from mlxcache.cli.doctor.model import layers, options, sessions  # noqa: PLC0415 - as above

    checkpoints = model.layout.opaque
    columns = [
        "layers",
        "kind, and how it is reused",
        "per token",
        *(["per checkpoint"] if checkpoints else []),
    ]
    _print(console, columns, (row[: len(columns)] for row in layers(model)))
    if not model.layout.cacheable:
        return
    columns = ["a session of", "RAM", "fit", "disk", "fit"]
    columns += ["checkpoints"] if checkpoints else []
    _print(console, columns, sessions(fit, checkpoints=checkpoints))
    _print(console, ["", ""], options(model))


def _print(console: Console, columns: Sequence[str], rows: Iterator[Sequence[str]]) -> None:
    table = Table(
        box=None, pad_edge=False, header_style="bold", show_header=any(columns), expand=False
    )
    for at, heading in enumerate(columns):
        figure = at > 0 and bool(heading) and not heading.startswith("kind")
        table.add_column(heading, justify="right" if figure else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)


def _nothing(_: int, __: int) -> None:
    """Show no progress: a program reads the output."""
