"""The command `mlxcache prove`: measure mlxcache and mlx-lm, and write one report.

Each scenario starts the processes that it needs and writes its figures into `Findings`, so that
figures taken before a failure are kept. The report contains nothing that identifies the machine or
its user.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import psutil
import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from mlxcache.bench import findings, prove_http
from mlxcache.bench.command import check_names, scratch
from mlxcache.bench.context import (
    FULL,
    QUICK,
    Clock,
    Context,
    Scale,
    Subject,
    TimeUp,
    usable_bytes,
)
from mlxcache.bench.findings import Findings, NotApplicable
from mlxcache.bench.machine import describe_machine, device_info, private_strings, scrub
from mlxcache.bench.process import tail
from mlxcache.bench.report import wide_console
from mlxcache.bench.shapes import SIZES, WEIGHTS, Weights
from mlxcache.config.flags import option, switch
from mlxcache.errors import MlxcacheError, ModelError
from mlxcache.model.folder import checked_config
from mlxcache.typed import convert

# -- one run ---------------------------------------------------------------------------------------

Scenario = Callable[[Context], None]
T = TypeVar("T")
OnText = Callable[[str], None]

CONTEXT_SHARE = 0.75
"""Maximum share of the model's context for a prefix; the rest is left for replies."""


class ChildFailed(Exception):
    pass


def in_child(name: str) -> Scenario:
    def play(context: Context) -> None:
        scale = scale_for(context.subject, context.scale)
        if not context.fits(name, scale.deep):
            return
        context.on_step("an engine of its own")
        model, folder = str(context.subject.path), str(context.folder / f"within-{name}")
        options = {"model": model, "folder": folder, "scale": asdict(scale)}
        context.found.merge(convert(Findings, _ask_child(name, options, context.folder)))

    return play


def load_in_child(model: str, folder: Path) -> Path:
    """Load a model in a child process, which can be ended at any time. Raises ModelError."""
    try:
        value = _ask_child("load", {"model": model}, folder)
    except ChildFailed as why:
        raise ModelError(f"{model} cannot be loaded: {why}") from why
    if "error" in value:
        raise ModelError(value["error"])
    return Path(value["path"])


def _ask_child(name: str, options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    log = folder / f"within-{name}.log"
    command = [sys.executable, "-m", "mlxcache.bench.prove_engine", name, json.dumps(options)]
    with log.open("wb") as errors:  # a session of its own: Ctrl-C is for this process alone
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
            start_new_session=True, check=False,
        )  # fmt: skip
    printed = done.stdout.strip().splitlines()
    if done.returncode or not printed:
        raise ChildFailed(f"{name} ended with status {done.returncode}\n{tail(log, 12)}".rstrip())
    value: dict[str, Any] = json.loads(printed[-1])
    return value


def scale_for(subject: Subject, scale: Scale) -> Scale:
    most = round(CONTEXT_SHARE * subject.context_length)
    if not most:
        return scale
    nbytes = most * (subject.kv_bytes_per_token or scale.disk_bytes)
    return replace(scale, deep=min(scale.deep, most), disk_bytes=min(scale.disk_bytes, nbytes))


SCENARIOS: Mapping[str, Scenario] = {
    "equality": in_child("equality"),
    "device_error": in_child("device_error"),
    "first_token": prove_http.first_token,
    "decode": prove_http.decode,
    "command_buffers": prove_http.command_buffers,
    "speculation": in_child("speculation"),
    "prefill": prove_http.prefill,
    "restore_speed": in_child("restore_speed"),
    "write_behind": in_child("write_behind"),
    "peak_memory": in_child("peak_memory"),
    "growth": in_child("growth"),
    "awake": prove_http.awake,
    "churn": prove_http.churn,
    "first_token_long": prove_http.first_token_long,
}
"""All scenarios, in the order in which they run on a model."""

IF_NAMED = ("churn",)  # scenarios that run only if they are named

QUANTISED = (
    "equality", "first_token", "decode", "speculation", "prefill", "first_token_long",
)  # fmt: skip
"""Scenarios that also run on the second random model; others do not depend on the weights."""

QUICKLY = ("equality",)  # scenarios that run on the second model in a quick run

INTERRUPTED = "the run was interrupted"

LAST = ("first_token_long",)  # scenarios that run after all others have run on every model


@dataclass(frozen=True, slots=True)
class Options:
    model: str | None
    size: str
    weights: Sequence[Weights]
    names: Sequence[str]
    scale: Scale
    minutes: float
    out: Path | None = None


class LazySubject:
    def __init__(self, label: str, make: Callable[[], Subject]):
        self.label = label
        self._make = make
        self._made: Subject | Exception | None = None

    def subject(self, clock: Clock) -> Subject:
        """Return the model, made at the first call within the time left. Raises its error again."""
        if self._made is None:
            try:
                with clock.bounding():
                    self._made = self._make()
                self.label = self._made.label
            except TimeUp as why:
                self._made = TimeUp(f"no model: {why}")
            except Exception as error:  # noqa: BLE001 - it is raised below, at each call
                self._made = error
        if isinstance(self._made, Exception):
            raise self._made
        return self._made


@dataclass(slots=True)
class Proof:
    options: Options
    folder: Path
    on_step: Callable[[str], None]
    on_begin: Callable[[str], None]
    found: list[Findings] = field(default_factory=list)
    interrupted: str | None = None
    _making_s: float = 0.0

    def play(self) -> None:
        """Run every scenario that fits the time limit, and record the others as not run. Blocks.

        Main thread only. Raises ModelError if the user's model cannot be loaded.
        """
        options = self.options
        clock = Clock(60 * options.minutes)
        subjects = self._subjects(clock)
        began = time.monotonic()
        plan = list(planned(options.names, subjects, QUANTISED))
        for number, (name, lazy) in enumerate(plan, 1):
            found = Findings(name, lazy.label)
            self.found.append(found)
            if options.scale.quick and lazy is not subjects[0] and name not in QUICKLY:
                found.status = "not run"
                found.error = f"on a second model, a quick run has only {', '.join(QUICKLY)}"
                continue
            if self.interrupted is None and clock.left_s:
                minutes = (time.monotonic() - began) / 60
                self.on_begin(f"{number} of {len(plan)} {name}, {minutes:.0f} min so far")
            self._play_one(SCENARIOS[name], found, lazy, clock)
            _scrub(found, private_strings(options.model, self.folder, options.out))

    def _subjects(self, clock: Clock) -> list[LazySubject]:
        options = self.options
        if options.model is None:
            return [
                LazySubject(_label(options.size, one), partial(self._random, one, clock))
                for one in options.weights
            ]
        self.on_step("loading the model, which may be downloaded first")
        lazy = LazySubject("the model given", partial(self._given, options.model))
        try:
            lazy.subject(clock)
        except TimeUp:
            pass  # as each scenario will find
        except KeyboardInterrupt:
            self.interrupted = INTERRUPTED
        return [lazy]

    def _given(self, model: str) -> Subject:
        folder = load_in_child(model, self.folder)
        config = checked_config(folder)
        return Subject(folder, describe_config(config), config)

    def _random(self, weights: Weights, clock: Clock) -> Subject:
        if self._making_s > clock.left_s:
            raise TimeUp(f"about {self._making_s:.0f} s needed, {clock.left_s:.0f} s left")

        from mlxcache.bench.random_model import make_random  # noqa: PLC0415 - as above

        size = self.options.size
        label = _label(size, weights)
        self.on_step(f"making the model: {label}")
        began = time.monotonic()
        folder = make_random(self.folder / f"{size}-{weights}", size, weights)
        self._making_s = time.monotonic() - began
        return Subject(folder, label, checked_config(folder))

    def _play_one(
        self, scenario: Scenario, found: Findings, lazy: LazySubject, clock: Clock
    ) -> None:
        if self.interrupted is not None:
            found.status, found.error = "not run", self.interrupted
            return
        before = children()
        began = time.monotonic()
        try:
            subject = lazy.subject(clock)
            began = time.monotonic()
            context = Context(
                subject, self.options.scale, clock, self.folder, usable_bytes(device_info()), found,
                lambda step: self.on_step(f"{found.name}, {found.model}: {step}"),
            )  # fmt: skip
            with clock.bounding():
                scenario(context)
        except NotApplicable as why:
            found.status, found.error = "not applicable", str(why)
        except TimeUp as why:
            found.status, found.error = "not run", str(why)
            if found.tables:
                found.not_run.append("the rest of it: the time limit has passed")
        except KeyboardInterrupt:
            self.interrupted = INTERRUPTED
            found.status, found.error = "not run", INTERRUPTED
        except Exception as error:  # noqa: BLE001 - it is reported, and the other scenarios go on
            found.status, found.error = "failed", f"{type(error).__name__}: {error}"
        finally:
            end_children(before)
            found.seconds = time.monotonic() - began
        if found.status == "done" and not found.tables and found.not_run:
            found.status, found.error = "not run", found.not_run.pop(0)


def _label(size: str, weights: Weights) -> str:
    return f"{size} with random weights, {weights}"


def planned(
    names: Sequence[str], subjects: Sequence[T], again: Sequence[str]
) -> Iterator[tuple[str, T]]:
    """Yield names of scenarios with a model to run them on, in order; those in `LAST` at the end.

    All run on the first model, and those that are also in `again` on the others.
    """
    for last in (False, True):
        for number, subject in enumerate(subjects):
            for name in SCENARIOS:
                due = name in names and (number == 0 or name in again)
                if due and (name in LAST) == last:
                    yield name, subject


def describe_config(config: Mapping[str, object]) -> str:
    text = config.get("text_config")
    sizes = text if isinstance(text, Mapping) else config
    layers, hidden = sizes.get("num_hidden_layers"), sizes.get("hidden_size")
    quantised = config.get("quantization")
    bits = quantised.get("bits") if isinstance(quantised, Mapping) else None
    words = [str(config.get("model_type"))]
    if layers and hidden:
        words.append(f"{layers} layers of {hidden}")
    dtype = sizes.get("dtype") or sizes.get("torch_dtype")
    words.append(f"{bits} bits" if bits else str(dtype or "not quantised"))
    return ", ".join(words)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def end_children(before: set[psutil.Process]) -> None:
    left = children() - before
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(left, timeout=5)


def _scrub(found: Findings, private: Sequence[str]) -> None:
    found.error = None if found.error is None else scrub(found.error, private)
    found.unchecked = [replace(one, why=scrub(one.why, private)) for one in found.unchecked]
    for texts in (found.notes, found.not_run):
        texts[:] = [scrub(one, private) for one in texts]


# -- the command -----------------------------------------------------------------------------------

DEFAULT_SIZE, QUICK_SIZE = "0.6b", "tiny"

Model = Annotated[
    str | None,
    option("PATH|HUB_ID", "Model to measure. Default: a generated one with random weights."),
]
Size = Annotated[
    str | None,
    option(
        "SIZE",
        f"Shape of the generated model: {', '.join(SIZES)}. "
        f"Default: {DEFAULT_SIZE}, with --quick {QUICK_SIZE}.",
    ),
]
WeightsOption = Annotated[
    str | None,
    option(
        "|".join(WEIGHTS),
        "Weights of the generated model. Default: one model of each.",
        "--weights",
    ),
]
Only = Annotated[
    list[str] | None,
    option(
        "NAME",
        f"One of {', '.join(SCENARIOS)}. Repeatable; default: all but {', '.join(IF_NAMED)}.",
    ),
]
Quick = Annotated[
    bool,
    switch("Use short prompts and replies, for which bounds are not checked.", "--quick"),
]
Minutes = Annotated[
    float,
    option("N", "Time limit of the whole run, including making or loading models.", min=0.1),
]
Out = Annotated[
    Path | None,
    option(
        "FILE",
        "The report; its figures are in a .json file of the same name. Both are overwritten. "
        "Default: mlxcache-proof-DATE-TIME.md.",
        "--out",
    ),
]
Strict = Annotated[
    bool,
    switch("Also exit with 1 if a bound failed or none was checked.", "--assert"),
]


def prove(
    *,
    model: Model = None,
    size: Size = None,
    weights: WeightsOption = None,
    only: Only = None,
    quick: Quick = False,
    minutes: Minutes = 30.0,
    out: Out = None,
    strict: Strict = False,
) -> None:
    """Measure mlxcache and mlx-lm on this machine, and write one report that can be published.

    Exit status 1: a scenario failed, the run was interrupted, nothing was measured, or the report
    could not be written; with --assert also if a figure is outside its bound, or no bound was
    checked. Exit status 2: wrong usage, or a model that cannot be loaded.
    """
    usual = [name for name in SCENARIOS if name not in IF_NAMED]
    check_names(only or (), list(SCENARIOS))
    size = size or (QUICK_SIZE if quick else DEFAULT_SIZE)
    check_names([size], list(SIZES))
    chosen: tuple[Weights, ...] = tuple(one for one in WEIGHTS if weights in (None, one))
    if not chosen:
        raise typer.BadParameter(f"--weights {weights}: not one of {', '.join(WEIGHTS)}")
    began, load = datetime.now(UTC), _load_average()
    out = out or Path(f"mlxcache-proof-{began.astimezone():%Y%m%d-%H%M%S}.md")
    _check_out(out)
    scale = QUICK if quick else FULL
    console, errors = wide_console(), LastingConsole(stderr=True, highlight=False, soft_wrap=True)
    with scratch() as folder, steps(console, errors) as (on_step, on_begin):
        options = Options(model, size, chosen, only or usual, scale, minutes, out)
        proof = Proof(options, folder, on_step, on_begin)
        try:
            proof.play()
        except (MlxcacheError, OSError, ValueError) as error:
            errors.print(Text.assemble(("Error: ", "bold red"), str(error)))
            sys.exit(2)
    run = {
        "date": began.isoformat(timespec="seconds"),
        "lengths": "quick" if quick else "full",
        "minutes": minutes,
        "load average before": load,
        "load average after": _load_average(),
    }
    machine = describe_machine()
    markdown = findings.as_markdown(machine, run, proof.found)
    failure: OSError | None = None
    try:  # before it is shown: the terminal may be closed
        beside = findings.write(out, markdown, findings.as_json(machine, run, proof.found))
        written = f"Written: {out} and {beside}."
    except OSError as error:
        failure, written = error, f"Not written: {error}. The report is above."
    console.print(markdown, markup=False, highlight=False, soft_wrap=True)
    console.print(written, style="red" if failure else "", markup=False, soft_wrap=True)
    if failure is not None:
        sys.exit(1)
    if why := why_failed(proof, strict=strict):
        errors.print(f"Exit status 1: {why}.", markup=False)
        sys.exit(1)


class LastingConsole(Console):
    """Console that stops printing if its terminal or pipe closes, instead of exiting."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def why_failed(proof: Proof, *, strict: bool) -> str | None:
    checks = [check for found in proof.found for check in found.checks]
    if proof.interrupted is not None:
        return proof.interrupted
    if any(found.status == "failed" for found in proof.found):
        return "a scenario failed"
    if not any(found.status == "done" or found.tables for found in proof.found):
        return "nothing was measured"
    if strict and not checks:
        return "no bound was checked"
    if strict and not all(check.ok for check in checks):
        return "a bound failed"
    return None


@contextmanager
def steps(console: Console, errors: Console) -> Iterator[tuple[OnText, OnText]]:
    """Yield `on_step` and `on_begin` of `Proof`: a status on a terminal, else lines."""
    if not console.is_terminal:

        def on_begin(line: str) -> None:
            with suppress(OSError):  # a measurement does not end with the terminal that it began in
                errors.print(line, markup=False)

        yield lambda _: None, on_begin
        return
    with console.status("preparing") as status:
        yield lambda step: status.update(escape(step)), lambda _: None


def _check_out(out: Path) -> None:
    """Raise BadParameter if the report could not be written to `out` after the measurements."""
    if out.suffix == ".json" or not out.parent.is_dir():
        raise typer.BadParameter(f"--out {out}: not a Markdown file in a folder that exists")
    for one in (out, out.with_suffix(".json") if out.name else out):
        if one.is_dir() or not os.access(one if one.exists() else one.parent, os.W_OK):
            raise typer.BadParameter(f"--out {out}: {one} cannot be written")


def _load_average() -> str:
    return ", ".join(f"{load:.1f}" for load in os.getloadavg())
