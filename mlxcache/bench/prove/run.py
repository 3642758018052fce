"""One run: models made or resolved, scenarios played within the time limit, the report written."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import psutil

from mlxcache.bench.prove import first_token, speed
from mlxcache.bench.prove.awake import awake
from mlxcache.bench.prove.child import in_child
from mlxcache.bench.prove.clock import Clock, TimeUp
from mlxcache.bench.prove.context import (
    Context,
    NotApplicable,
    Subject,
    read_config,
    usable_bytes,
)
from mlxcache.bench.prove.findings import Findings
from mlxcache.bench.prove.machine import device_info
from mlxcache.bench.prove.privacy import private_strings, scrub
from mlxcache.bench.prove.scale import Scale
from mlxcache.model.hub import resolve
from mlxcache.model.random_model import Weights, make_random

Scenario = Callable[[Context], None]

SCENARIOS: Mapping[str, Scenario] = {
    "equality": in_child("equality"),
    "device_error": in_child("device_error"),
    "first_token": first_token.short,
    "decode": speed.decode,
    "prefill": speed.prefill,
    "restore_speed": in_child("restore_speed"),
    "write_behind": in_child("write_behind"),
    "peak_memory": in_child("peak_memory"),
    "growth": in_child("growth"),
    "awake": awake,
    "first_token_long": first_token.long,
}
"""All scenarios, in the order in which they are played on a model."""

QUANTISED = ("equality", "first_token", "decode", "prefill", "first_token_long")
"""Those also played on the second model made here: the others do not depend on the weights."""

QUICKLY = ("equality",)
"""Those played on the second model in a quick run."""

LAST = ("first_token_long",)
"""Those played on every model only after all others."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. `model` None: random weights of `size`, in each of `weights`.

    `out`: the report, whose folder is private.
    """

    model: str | None
    size: str
    weights: Sequence[Weights]
    names: Sequence[str]
    scale: Scale
    minutes: float
    out: Path | None = None


@dataclass(slots=True)
class Proof:
    """The scenarios of one run, and what they found so far. `folder` receives all files."""

    options: Options
    folder: Path
    on_step: Callable[[str], None]
    found: list[Findings] = field(default_factory=list)
    interrupted: str | None = None

    def play(self) -> None:
        """Play every scenario that fits the time limit; list the others. Blocks.

        Main thread only. Raises ModelError or OSError if the model cannot be resolved or made.
        """
        options = self.options
        subjects = list(self._subjects())
        clock = Clock(60 * options.minutes)
        memory = usable_bytes(device_info())
        again = QUICKLY if options.scale.quick else QUANTISED
        for name, subject in planned(options.names, subjects, again):
            found = Findings(name, subject.label)
            self.found.append(found)
            label = f"{name}, {subject.label}"
            context = Context(
                subject, options.scale, clock, self.folder, memory, found,
                lambda step, label=label: self.on_step(f"{label}: {step}"),  # type: ignore[misc]
            )  # fmt: skip
            began = time.monotonic()
            self._play_one(SCENARIOS[name], context)
            found.seconds = time.monotonic() - began
            _scrub(found, private_strings(options.model, subject.path, options.out, self.folder))

    def _subjects(self) -> Iterator[Subject]:
        options = self.options
        if options.model is not None:
            folder = resolve(options.model)
            config = read_config(folder)
            yield Subject(folder, describe_config(config), config)
            return
        for weights in options.weights:
            self.on_step(f"making the model: {options.size}, {weights}")
            folder = make_random(self.folder / f"{options.size}-{weights}", options.size, weights)
            label = f"{options.size} with random weights, {weights}"
            yield Subject(folder, label, read_config(folder))
        mx.clear_cache()

    def _play_one(self, scenario: Scenario, context: Context) -> None:
        found = context.found
        if self.interrupted is not None:
            found.status, found.error = "not run", self.interrupted
            return
        before = children()
        try:
            with context.clock.bounding():
                scenario(context)
        except NotApplicable as why:
            found.status, found.error = "not applicable", str(why)
        except TimeUp as why:
            found.status, found.error = "not run", str(why)
            if found.tables:
                found.not_run.append("the rest of it: the time limit has passed")
        except KeyboardInterrupt:
            self.interrupted = "the run was interrupted"
            found.status, found.error = "not run", self.interrupted
        except Exception as error:  # noqa: BLE001 - it is reported, and the other scenarios go on
            found.status, found.error = "failed", f"{type(error).__name__}: {error}"
        finally:
            end_children(before)
        if found.status == "done" and not found.tables and found.not_run:
            found.status, found.error = "not run", found.not_run.pop(0)


def planned(
    names: Sequence[str], subjects: Sequence[Subject], again: Sequence[str]
) -> Iterator[tuple[str, Subject]]:
    """Each scenario of `names` with each model that it is played on, in order.

    Only those in `again` are played on other models than the first.
    """
    for last in (False, True):
        for number, subject in enumerate(subjects):
            for name in SCENARIOS:
                due = name in names and (number == 0 or name in again)
                if due and (name in LAST) == last:
                    yield name, subject


def describe_config(config: Mapping[str, object]) -> str:
    """A model in words, by its architecture and sizes: never by its name or folder."""
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
    """Processes that this one and its children started, and that still run."""
    return set(psutil.Process().children(recursive=True))


def end_children(before: set[psutil.Process]) -> None:
    """Kill all `children` that are not in `before`."""
    left = children() - before
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(left, timeout=5)


def _scrub(found: Findings, private: Sequence[str]) -> None:
    """Remove what is private from the texts of `found`."""
    found.error = None if found.error is None else scrub(found.error, private)
    for texts in (found.notes, found.not_run, found.unchecked):
        texts[:] = [scrub(one, private) for one in texts]
