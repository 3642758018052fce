"""The command `mlxcache doctor`: find problems of this machine that slow a server down."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxcache.cli.connect import base_url
from mlxcache.cli.doctor import clients, disk, mac, machine, serving
from mlxcache.cli.doctor.away import examine_remote
from mlxcache.cli.doctor.finding import Finding, worst
from mlxcache.cli.doctor.hosts import examine_hosts
from mlxcache.cli.options import Config, Flags, with_settings
from mlxcache.cli.output import reporting
from mlxcache.cli.progress import byte_bar, count_bar
from mlxcache.cli.show import print_json
from mlxcache.cli.target import CacheDir, Json
from mlxcache.config import Settings, disk_limit, format_size, load_settings, ram_limit
from mlxcache.errors import ModelError
from mlxcache.store.mac_folder import locate_cache_dir

if TYPE_CHECKING:
    from mlxcache.cache.capacity import Fit
    from mlxcache.cli.doctor.several import Checked
    from mlxcache.model.examine import Examined

WIDTH = 80
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}

Quick = Annotated[
    bool, typer.Option("--quick", metavar="", help="Leave out the test of the disk's speed.")
]


@with_settings(
    *("adapter", "draft_model", "kv_bits", "ram", "disk", "host", "port"),
    *("keep_awake", "remote", "remote_key_file", "trust_remote_code", "hosts", "hostfile"),
)
def doctor(
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH|HUB_ID",
            help="Show how this model caches, what conversations cost, and how many fit; "
            "repeatable. Default: the models of the settings.",
        ),
    ] = None,
    flags: Flags,
    config: Config = None,
    cache_dir: CacheDir = None,
    quick: Quick = False,
    as_json: Json = False,
) -> None:
    """Check this machine, its settings, and the models that are served.

    No server is needed. Each WARN and FAIL comes with a remedy. Exit status 1 if a check fails.
    """
    with reporting():
        given = {"model": model or None, "cache_dir": cache_dir, **flags}
        wanted = load_settings(given, os.environ, config)
        settings = replace(wanted, cache_dir=locate_cache_dir(wanted.cache_dir))
        report = run_checks(settings, quick=quick, shown=not as_json)
    if as_json:
        print_json(report.as_object())
    else:
        report.show()
    if worst(report.findings) == "fail":
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Report:
    """Results of all checks, in display order.

    `models` holds the examined models, each with how many conversations fit in memory and on disk.
    It is empty if the settings name no model. A model that cannot be examined is left out, and has
    a failed finding.
    """

    findings: tuple[Finding, ...]
    models: tuple[Checked, ...]

    def as_object(self) -> dict[str, Any]:
        """Return the findings and the models as an object for `doctor --json`.

        Its keys are `object`, `status` (the worst of the findings), `findings`, `model` (the first
        examined model, if there is one) and, if there are several, `models` by label.
        """
        found: dict[str, Any] = {
            "object": "doctor",
            "status": worst(self.findings),
            "findings": [one.as_object() for one in self.findings],
        }
        if self.models:
            from mlxcache.cli.doctor.model import as_object  # noqa: PLC0415 - imports mlx-lm

            objects = [as_object(one.found, one.fit) for one in self.models]
            found["model"] = objects[0]
            if len(objects) > 1:
                labels = (one.entry.label for one in self.models)
                found["models"] = dict(zip(labels, objects, strict=True))
        return found

    def show(self) -> None:
        """Print the findings, each with its remedy, and the tables of each model.

        These are its groups of layers, how many conversations fit, and the flags that it supports.
        """
        console = Console(highlight=False, markup=False)
        if not console.is_terminal or console.width > WIDTH:
            console = Console(highlight=False, markup=False, width=WIDTH)
        print_findings(console, self.findings)
        for one in self.models:
            if len(self.models) > 1:
                console.print(Text(f"\n{one.entry.label}", "bold"))
            _show_model(console, one.found, one.fit)


def run_checks(settings: Settings, *, quick: bool, shown: bool) -> Report:
    """Run all checks for a server with `settings`, and return their results. Blocks for seconds.

    `quick` skips the measurement of the disk's speed. With `shown`, slow checks show a progress bar
    on standard error.
    """
    url = base_url(settings.host, settings.port)
    with count_bar("examining the machine and the model") if shown else nullcontext():
        versions = machine.examine_versions()
        of_machine, models = _examine_machine(settings)
    findings = (
        versions,
        *of_machine,
        machine.examine_files(),
        *_examine_disk(settings, quick=quick, shown=shown),
        *([examine_remote(settings)] if settings.remote is not None else []),
        *(examine_hosts(settings) if settings.hosts or settings.hostfile else []),
        serving.examine_port(settings),
        *serving.examine_servers(settings, url),
        *clients.examine_clients(os.environ, Path.home(), url, settings.rules),
    )
    return Report(findings, models)


def _examine_disk(settings: Settings, *, quick: bool, shown: bool) -> list[Finding]:
    findings = [disk.examine_folder(settings.cache_dir)]
    if findings[0].status == "fail":
        return findings
    findings.append(disk.examine_room(settings.cache_dir, settings.disk))
    if not quick:
        with byte_bar("testing the disk") if shown else nullcontext(_nothing) as step:
            findings.append(disk.examine_speed(settings.cache_dir, step))
    return findings


def _examine_machine(settings: Settings) -> tuple[list[Finding], tuple[Checked, ...]]:
    """Check the machine and the models that the settings name.

    The weights of a single model count as memory needed in addition to the budget `--ram`; those of
    several models are within the budget. Returns the findings, and the models that could be
    examined. If MLX cannot be imported, these are one failed finding and ().
    """
    try:
        host = machine.host()
    except ImportError as error:
        remedy = "reinstall mlxcache: pip install --force-reinstall mlxcache"
        return [Finding("MLX", "fail", f"cannot be imported: {error}", remedy)], ()
    of_models, models = _examine_models(settings, host)
    weights, beside = 0, "in addition to the model's weights"
    if len(settings.entries) > 1:
        beside = "for all models and their weights"
    elif models:
        weights = models[0].found.info.weights_bytes
        beside = f"in addition to the model's {format_size(weights)} of weights"
    ram = _ram_budget(settings, host, weights)
    findings = (
        machine.examine_system(host),
        *of_models,
        machine.examine_memory(host, ram, weights, beside),
        machine.examine_metal(host, ram, weights),
        *mac.examine_mac(host.chip, host.macos, keep_awake=settings.keep_awake),
        machine.examine_blas(host),
    )
    return [one for one in findings if one is not None], models


def _ram_budget(settings: Settings, host: machine.Host, weights: int) -> int:
    return ram_limit(
        settings.ram,
        machine_bytes=host.total,
        working_set_bytes=host.working_set,
        weights_bytes=weights,
    )


def _examine_models(
    settings: Settings, host: machine.Host
) -> tuple[list[Finding], tuple[Checked, ...]]:
    """Examine the models that the settings name.

    Returns findings, and the models that could be examined. If the settings name several models,
    the text of each finding begins with its model's label, and a last finding tells which models
    fit into the budget at once.
    """
    if settings.model is None:
        return [], ()
    from mlxcache.cli.doctor.several import examine_together  # noqa: PLC0415 - imports mlx-lm

    findings, models = [], []
    several = len(settings.entries) > 1
    shared = _ram_budget(settings, host, 0) if several else None
    for entry in settings.entries:
        found, model = _examine_model(settings.for_model(entry), host, shared)
        label = f"{entry.label}: " if several else ""
        findings += [replace(one, value=f"{label}{one.value}") for one in found]
        models += [model] if model is not None else []
    if shared is not None and models:
        findings.append(examine_together(models, shared))
    return findings, tuple(models)


def _examine_model(
    settings: Settings, host: machine.Host, shared: int | None
) -> tuple[list[Finding], Checked | None]:
    """Examine one model of the settings.

    `settings`: those that name this model only (`Settings.for_model`). `shared`: bytes of the
    budget that all models of the server share, their weights included; None if this is the only
    model. Returns findings, and the examined model; if it cannot be examined, one failed finding
    and None.
    """
    # Here and not above: mlx-lm takes seconds to import.
    from mlxcache.cache.capacity import fit  # noqa: PLC0415
    from mlxcache.cli.doctor.model import (  # noqa: PLC0415
        TOKENS,
        examine_fit,
        examine_sampling,
    )
    from mlxcache.cli.doctor.several import Checked, examine_adapter  # noqa: PLC0415
    from mlxcache.model.examine import examine  # noqa: PLC0415
    from mlxcache.model.hub import check, here  # noqa: PLC0415
    from mlxcache.model.load import ModelSpec  # noqa: PLC0415

    entry = settings.entries[0]
    assert entry.model is not None
    spec = ModelSpec(
        entry.model,
        adapter=settings.adapter,
        trust_remote_code=settings.trust_remote_code,
        context=settings.context,
        draft=settings.draft_model,
        images=settings.feeds_images,
    )
    try:
        if (path := here(entry.model)) is not None:
            check(path, entry.model)
        model = examine(spec, settings.kv_bits)
    except ModelError as error:
        return [Finding("model", "fail", str(error))], None
    weights = model.info.weights_bytes
    ram = _ram_budget(settings, host, weights) if shared is None else max(0, shared - weights)
    fits = fit(
        model.layout,
        ram=ram,
        disk=disk_limit(settings.disk, settings.cache_dir / "store"),
        tokens=sorted({min(n, model.info.context_length) for n in TOKENS}),
    )
    used = not settings.no_generation_config
    findings = [
        *examine_fit(model, fits),
        *examine_adapter(entry),
        *examine_sampling(model.info, used=used),
    ]
    if path is None:
        findings.append(Finding("files", "ok", "not on this machine yet, downloaded when needed"))
    return findings, Checked(entry, model, fits)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print findings to `console`. Remedies are not wrapped, so that commands can be copied."""
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


def _show_model(console: Console, model: Examined, fit: Fit) -> None:
    from mlxcache.cli.doctor.model import layers, options, sessions  # noqa: PLC0415 - imports mlx-lm

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
    """Ignore the bytes done and the total: used as a progress callback if no progress is shown."""
