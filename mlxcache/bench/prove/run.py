"""One run of `mlxcache prove`: make or load models, and run scenarios within the time limit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlx.core as mx
import psutil

from mlxcache.bench.prove import first_token, speed
from mlxcache.bench.prove.awake import awake
from mlxcache.bench.prove.child import in_child
from mlxcache.bench.prove.churn import churn
from mlxcache.bench.prove.clock import Clock, TimeUp
from mlxcache.bench.prove.context import (
    Context,
    NotApplicable,
    Subject,
    read_config,
    usable_bytes,
)
from mlxcache.bench.prove.findings import Findings
from mlxcache.bench.prove.loading import load_in_child
from mlxcache.bench.prove.machine import device_info
from mlxcache.bench.prove.privacy import private_strings, scrub
from mlxcache.bench.prove.scale import Scale
from mlxcache.model.random_model import Weights, make_random

Scenario = Callable[[Context], None]
T = TypeVar("T")

SCENARIOS: Mapping[str, Scenario] = {
    "equality": in_child("equality"),
    "device_error": in_child("device_error"),
    "first_token": first_token.short,
    "decode": speed.decode,
    "command_buffers": speed.command_buffers,
    "speculation": in_child("speculation"),
    "prefill": speed.prefill,
    "restore_speed": in_child("restore_speed"),
    "write_behind": in_child("write_behind"),
    "peak_memory": in_child("peak_memory"),
    "growth": in_child("growth"),
    "awake": awake,
    "churn": churn,
    "first_token_long": first_token.long,
}
"""All scenarios, in the order in which they run on a model."""

IF_NAMED = ("churn",)
"""Scenarios that run only if they are named."""

QUANTISED = (
    "equality", "first_token", "decode", "speculation", "prefill", "first_token_long",
)  # fmt: skip
"""Scenarios that also run on the second random model; others do not depend on the weights."""

QUICKLY = ("equality",)
"""Scenarios that run on the second model in a quick run."""

INTERRUPTED = "the run was interrupted"

LAST = ("first_token_long",)
"""Scenarios that run after all others have run on every model."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one run of `mlxcache prove`.

    If `model` is None, models with random weights are made: one of `size` for each of `weights`.
    `names` are the scenarios, and `minutes` is the time limit of all. `out` is the report's path,
    whose folder is not mentioned in the report.
    """

    model: str | None
    size: str
    weights: Sequence[Weights]
    names: Sequence[str]
    scale: Scale
    minutes: float
    out: Path | None = None


class LazySubject:
    """A model that is made or loaded when it is first needed."""

    def __init__(self, label: str, make: Callable[[], Subject]):
        self.label = label
        self._make = make
        self._subject: Subject | None = None
        self._error: Exception | None = None

    def subject(self, clock: Clock) -> Subject:
        """Return the model, which is made or loaded at the first call, within the time left.

        Raises TimeUp, or the error of making the model; later calls raise the same error.
        """
        if self._error is not None:
            raise self._error
        if self._subject is None:
            try:
                with clock.bounding():
                    self._subject = self._make()
            except TimeUp as why:
                self._error = TimeUp(f"no model: {why}")
                raise self._error from why
            except Exception as error:
                self._error = error
                raise
        return self._subject


@dataclass(slots=True)
class Proof:
    """Scenarios of one run, and their findings so far (`found`).

    `folder` receives all files but the report. `on_step` is called with a text at each step, and
    `on_begin` with one for each scenario begun. `interrupted` is the reason why the run was cut
    short, or None.
    """

    options: Options
    folder: Path
    on_step: Callable[[str], None]
    on_begin: Callable[[str], None] = lambda _: None
    found: list[Findings] = field(default_factory=list)
    interrupted: str | None = None
    _making_s: float = 0.0

    def play(self) -> None:
        """Run every scenario that fits the time limit, and record the others as not run. Blocks.

        The limit includes downloading and making models. Main thread only. Raises ModelError if the
        user's model cannot be loaded.
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
        if options.model is not None:
            return [self._given(options.model, clock)]
        return [
            LazySubject(
                f"{options.size} with random weights, {weights}",
                partial(self._made, weights, clock),
            )
            for weights in options.weights
        ]

    def _given(self, model: str, clock: Clock) -> LazySubject:
        """Load `model`, which the user named, and return it. Raises ModelError.

        If the time limit passes first, raises nothing: the `subject` method of the result then
        raises TimeUp. If Ctrl-C is pressed first, sets `interrupted`, so that no scenario is run.
        """

        def look() -> Subject:
            folder = load_in_child(model, self.folder)
            config = read_config(folder)
            return Subject(folder, describe_config(config), config)

        self.on_step("loading the model, which may be downloaded first")
        lazy = LazySubject("the model given", look)
        try:
            subject = lazy.subject(clock)
        except TimeUp:
            return lazy
        except KeyboardInterrupt:
            self.interrupted = INTERRUPTED
            return lazy
        return LazySubject(subject.label, lambda: subject)

    def _made(self, weights: Weights, clock: Clock) -> Subject:
        """Make a model with random weights.

        Raises TimeUp if making the previous model took longer than the time left.
        """
        if self._making_s > clock.left_s:
            raise TimeUp(f"about {self._making_s:.0f} s needed, {clock.left_s:.0f} s left")
        size = self.options.size
        label = f"{size} with random weights, {weights}"
        self.on_step(f"making the model: {label}")
        began = time.monotonic()
        folder = make_random(self.folder / f"{size}-{weights}", size, weights)
        mx.clear_cache()
        self._making_s = time.monotonic() - began
        return Subject(folder, label, read_config(folder))

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


def planned(
    names: Sequence[str], subjects: Sequence[T], again: Sequence[str]
) -> Iterator[tuple[str, T]]:
    """Yield the names of scenarios, each with a model to run it on, in the order of the run.

    All scenarios of `names` run on the first model, and those that are also in `again` on the
    others. The order is that of the models, then that of `SCENARIOS`; those in `LAST` come at the
    end.
    """
    for last in (False, True):
        for number, subject in enumerate(subjects):
            for name in SCENARIOS:
                due = name in names and (number == 0 or name in again)
                if due and (name in LAST) == last:
                    yield name, subject


def describe_config(config: Mapping[str, object]) -> str:
    """Return a short text on a model's architecture, sizes and bits, without its name or folder.

    `config` is the content of its config.json.
    """
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
    """Return the running processes that this process and its children started."""
    return set(psutil.Process().children(recursive=True))


def end_children(before: set[psutil.Process]) -> None:
    """Kill all processes that `children` returns and that are not in `before`."""
    left = children() - before
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(left, timeout=5)


def _scrub(found: Findings, private: Sequence[str]) -> None:
    """Apply `scrub` with the strings `private` to the texts of `found`, in place."""
    found.error = None if found.error is None else scrub(found.error, private)
    found.unchecked = [replace(one, why=scrub(one.why, private)) for one in found.unchecked]
    for texts in (found.notes, found.not_run):
        texts[:] = [scrub(one, private) for one in texts]
