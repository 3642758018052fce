"""Sampling defaults in a model's generation_config.json.

Names and meanings are those of transformers:
https://huggingface.co/docs/transformers/main_classes/text_generation. A value that is not valid is
logged and ignored.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxcache.errors import BadRequest
from mlxcache.model.sampling import validate
from mlxcache.types import DEFAULTED, Sampling

log = logging.getLogger("mlxcache.model")

FILE = "generation_config.json"


def sampling_defaults(path: Path) -> dict[str, float]:
    """Return the sampling defaults in generation_config.json of the model's folder `path`.

    Maps names of `Sampling` fields, those in `DEFAULTED` such as "temperature", to values. Empty if
    there is no such file. `do_sample` false means greedy sampling: temperature 0. A value out of
    range is ignored with a warning, and so is a file that is not a JSON object.
    """
    config = _read(path)
    found: dict[str, float] = {}
    for name in DEFAULTED:
        if config.get(name) is None:
            continue
        value = _checked(name, config[name])
        if value is None:
            wrong = config[name]
            log.warning("%s: %s %r ignored: not a number in its range", path / FILE, name, wrong)
        else:
            found[name] = value
    sampled = config.get("do_sample")
    if sampled is False:
        found["temperature"] = 0.0
    elif sampled not in (None, True):
        log.warning("%s: do_sample %r ignored: not true or false", path / FILE, sampled)
    return found


def is_object(path: Path) -> bool:
    """Return whether generation_config.json in the folder `path` is missing or a JSON object.

    False also for a file that cannot be read.
    """
    try:
        return isinstance(json.loads((path / FILE).read_text(encoding="utf-8")), dict)
    except FileNotFoundError:
        return True
    except (OSError, ValueError, RecursionError):
        return False


def _read(path: Path) -> Mapping[str, Any]:
    if not is_object(path):
        log.warning("%s ignored: not a JSON object", path / FILE)
        return {}
    file = path / FILE
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return found


def _checked(name: str, value: object) -> float | None:
    """Return `value` if it is a number in the range of the sampling field `name`, else None.

    A `top_k` such as 20.0 is returned as an int.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if name == "top_k" and isinstance(value, float):
        if not value.is_integer():
            return None
        value = int(value)
    try:
        validate(_with(Sampling(), {name: value}))
    except BadRequest:
        return None
    return value


def resolve(sampling: Sampling, defaults: Mapping[str, float]) -> Sampling:
    """Return `sampling` with the fields that the client left unset taken from `defaults`.

    `defaults`: the model's, as `sampling_defaults` returns them. A field without a default keeps
    its value. In the result no field counts as unset.
    """
    if not sampling.unset:
        return sampling
    found = {name: defaults[name] for name in sampling.unset & defaults.keys()}
    return _with(sampling, {**found, "unset": frozenset()})


def _with(sampling: Sampling, values: Mapping[str, Any]) -> Sampling:
    return replace(sampling, **values)


def describe(defaults: Mapping[str, float]) -> str:
    """Format the model's sampling defaults in one line, such as `temperature 0.6, top_k 20`."""
    stated = ((name, defaults[name]) for name in DEFAULTED if name in defaults)
    return ", ".join(f"{name} {value:g}" for name, value in stated)
