"""Models that a server offers, and the choice of one for the model name of a request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from mlxcache.config.sizes import parse_size
from mlxcache.errors import ConfigError, ModelError

Keep = Literal["always", "demand"] | float
"""Time for which an unused model stays loaded: always, or until another model needs its memory.

A number: that many seconds at most.
"""

DEMO_ID = "mlxcache-demo"

NEITHER = (
    "{model} is neither an existing folder nor a Hub id like owner/name, for example "
    "mlx-community/Qwen3-4B-Instruct-2507-4bit. Without a model, `mlxcache serve` serves the "
    "built-in demo."
)

_SNAPSHOT = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that a server offers, with the settings of its own.

    `model`: path or Hub id, None for the built-in demo. `name`: key of its table in config.toml.
    `keep`: None for the server's default. `ram`: the most that its weights and KV may take
    together. A field that is None or empty leaves the server's setting in force. `id`, derived from
    `model`: the name that clients see if there is no `name`.
    """

    model: str | None
    name: str | None = None
    aliases: tuple[str, ...] = ()
    context: int | None = None
    keep: Keep | None = None
    ram: str | int | None = None
    adapter: str | None = None
    draft_model: str | None = None
    chat_template_args: Mapping[str, Any] = field(default_factory=dict, hash=False)
    id: str = field(init=False)

    def __post_init__(self) -> None:
        if self.adapter is not None and self.model is None:
            raise ConfigError("--adapter needs the model it is made for: add --model PATH|HUB_ID")
        if self.draft_model is not None and self.model is None:
            raise ConfigError("--draft-model needs a model to draft for: add --model PATH|HUB_ID")
        object.__setattr__(self, "id", DEMO_ID if self.model is None else model_id(self.model))

    @property
    def label(self) -> str:
        return self.name or self.id

    def share_of(self, budget: int) -> int | None:
        return None if self.ram is None else parse_size(self.ram, total=budget)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.label, self.id, *self.aliases)))


@dataclass(frozen=True, slots=True)
class Route:
    """Model for requests whose model name matches a shell pattern, without regard to case."""

    pattern: str
    name: str


def match_model(
    requested: str | None, entries: Sequence[ModelEntry], routes: Sequence[Route] = ()
) -> int:
    """Return the index in `entries` of the model for a request that names `requested`.

    Its own names come before the patterns of `routes`, of which the first that matches counts. All
    other requests get the first entry, the default model.
    """
    if not requested:
        return 0
    found = find_model(requested, entries)
    if found is None:
        folded = requested.lower()
        for route in routes:
            if fnmatchcase(folded, route.pattern.lower()):
                found = find_model(route.name, entries)
                break
    return found or 0


def find_model(name: str, entries: Sequence[ModelEntry]) -> int | None:
    """Return the index of the entry with the name, id or alias `name`, or None.

    If several have it, a name counts before an id, an id before an alias, and then the first entry.
    Case is ignored if no entry has exactly `name`.
    """
    kinds: tuple[Callable[[ModelEntry], Iterable[str | None]], ...] = (
        lambda one: (one.name,),
        lambda one: (one.id,),
        lambda one: one.aliases,
    )
    for fold in (str, str.lower):
        for kind in kinds:
            for index, entry in enumerate(entries):
                if fold(name) in (fold(own) for own in kind(entry) if own):
                    return index
    return None


def check_names(entries: Sequence[ModelEntry]) -> None:
    owner: dict[str, str] = {}
    for entry in entries:
        for name in dict.fromkeys(one.lower() for one in (entry.label, *entry.aliases)):
            if name in owner:
                raise ConfigError(
                    f"two models have the name {name!r}: {owner[name]} and {entry.label}; give "
                    "each its own name or alias"
                )
            owner[name] = entry.label


def check_routes(routes: Sequence[Route], entries: Sequence[ModelEntry]) -> None:
    for route in routes:
        if find_model(route.name, entries) is None:
            known = ", ".join(dict.fromkeys(entry.label for entry in entries))
            raise ConfigError(
                f"{route.pattern}={route.name}: there is no model {route.name!r}; the models are "
                f"{known}"
            )


def model_id(model: str) -> str:
    """Return the name of a model that clients see, for its path or Hub id."""
    path = Path(model).expanduser()
    if not path.exists():
        return model
    path = path.resolve()
    if path.parent.name == "snapshots" and (found := _SNAPSHOT.fullmatch(path.parent.parent.name)):
        return f"{found['org']}/{found['name']}"
    return path.name


def find_folder(model: str) -> Path | None:
    """Return the folder that `model` names, None for a Hub id. Raises ModelError for neither."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(
            f"{path} is a file. --model takes the folder with config.json and the "
            "*.safetensors files, or a Hub id; GGUF files cannot be served."
        )
    if model.startswith((".", "/", "~")) or "\\" in model or model.count("/") > 1:
        raise ModelError(f"There is no folder {path}. --model takes a folder or a Hub id.")
    if "/" not in model:
        raise ModelError(NEITHER.format(model=model))
    return None
