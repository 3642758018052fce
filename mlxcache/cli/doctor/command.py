"""The command `mlxcache doctor`: the checks in their order, and the printing of findings."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mlxcache.cli.connect import base_url
from mlxcache.cli.doctor import Finding, clients, disk, machine, network, worst
from mlxcache.cli.options import CacheDir, Config, Flags, Json, with_settings
from mlxcache.cli.output import byte_bar, count_bar, narrow_console
from mlxcache.cli.show import Result
from mlxcache.config import Settings, format_size, load_settings
from mlxcache.config.flags import option, switch
from mlxcache.errors import ConfigError

if TYPE_CHECKING:
    from mlxcache.cli.doctor.models import Checked

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}

Quick = Annotated[bool, switch("Leave out the test of the disk's speed.", "--quick")]


@with_settings(
    *("adapter", "draft_model", "kv_bits", "ram", "disk", "host", "port"),
    *("keep_awake", "remote", "remote_key_file", "trust_remote_code", "hosts", "hostfile"),
)
def doctor(
    *,
    model: Annotated[
        list[str] | None,
        option(
            "PATH|HUB_ID",
            "Show how this model caches, what conversations cost, and how many fit; "
            "repeatable. Default: the models of the settings.",
        ),
    ] = None,
    flags: Flags,
    config: Config = None,
    cache_dir: CacheDir = None,
    quick: Quick = False,
    as_json: Json = False,
) -> Result:
    """Check this machine, its settings, and the models that are served.

    No server is needed. Each WARN and FAIL comes with a remedy. Exit status 1 if a check fails.
    """
    given = {"model": model or None, "cache_dir": cache_dir, **flags}
    wrong: tuple[Finding, ...] = ()
    try:
        settings = load_settings(given, os.environ, config)
    except ConfigError as error:
        settings = load_settings(given, os.environ, Path(os.devnull))
        remedy = "correct it; the other checks are made as if there were no such file"
        wrong = (Finding("settings", "fail", str(error), remedy),)
    report = run_checks(settings, quick=quick, shown=not as_json)
    report = replace(report, findings=(*wrong, *report.findings))
    status = int(worst(report.findings) == "fail")
    return Result(report.as_object(), report.show, status)


# -- the checks --------------------------------------------------------------------------------


def run_checks(settings: Settings, *, quick: bool, shown: bool) -> Report:
    """Run all checks for a server with `settings`, and return their results. Blocks for seconds."""
    with count_bar("examining the machine and the model", shown=shown):
        versions = machine.examine_versions()
        of_machine, models = _examine_machine(settings)
    url = base_url(settings.host, settings.port)
    findings = (
        versions,
        *of_machine,
        machine.examine_files(),
        *_examine_disk(settings, quick=quick, shown=shown),
        network.examine_remote(settings) if settings.remote is not None else None,
        *network.examine_hosts(settings),
        network.examine_port(settings),
        *network.examine_servers(settings, url),
        *clients.examine_clients(os.environ, Path.home(), url, settings.rules),
    )
    return Report(tuple(one for one in findings if one is not None), models)


def _examine_disk(settings: Settings, *, quick: bool, shown: bool) -> list[Finding]:
    findings = [disk.examine_folder(settings.cache_dir)]
    if findings[0].status == "fail":
        return findings
    findings.append(disk.examine_room(settings.cache_dir, settings.disk))
    if not quick:
        with byte_bar("testing the disk", shown=shown) as step:
            findings.append(disk.examine_speed(settings.cache_dir, step))
    return findings


def _examine_machine(settings: Settings) -> tuple[list[Finding | None], tuple[Checked, ...]]:
    """Check the machine, and the models that the settings name; return those examined too.

    The weights of a single model are needed beside the budget; those of several are within it.
    """
    try:
        host = machine.host()
    except ImportError as error:
        remedy = "reinstall mlxcache: pip install --force-reinstall mlxcache"
        return [Finding("MLX", "fail", f"cannot be imported: {error}", remedy)], ()
    of_models: list[Finding] = []
    models: tuple[Checked, ...] = ()
    if settings.model is not None:
        from mlxcache.cli.doctor.models import examine_models  # noqa: PLC0415 - imports mlx-lm

        of_models, models = examine_models(settings, host)
    weights, beside = 0, "in addition to the model's weights"
    if len(settings.entries) > 1:
        beside = "for all models and their weights"
    elif models:
        weights = models[0].found.info.weights_bytes
        beside = f"in addition to the model's {format_size(weights)} of weights"
    ram = machine.ram_budget(settings, host, weights)
    findings = [
        machine.examine_system(host),
        *of_models,
        machine.examine_memory(host, ram, weights, beside),
        machine.examine_metal(host, ram, weights),
        *machine.examine_mac(host.chip, host.macos, keep_awake=settings.keep_awake),
        machine.examine_blas(host),
    ]
    return findings, models


# -- printing ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Report:
    """Results of all checks in display order, and the models that could be examined."""

    findings: tuple[Finding, ...]
    models: tuple[Checked, ...]

    def as_object(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "object": "doctor",
            "status": worst(self.findings),
            "findings": [one.as_object() for one in self.findings],
        }
        if self.models:
            objects = {one.entry.label: one.as_object() for one in self.models}
            found["model"] = objects[self.models[0].entry.label]
            if len(objects) > 1:
                found["models"] = objects
        return found

    def show(self) -> None:
        console = narrow_console()
        print_findings(console, self.findings)
        for one in self.models:
            if len(self.models) > 1:
                console.print(Text(f"\n{one.entry.label}", "bold"))
            one.print(console)


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
