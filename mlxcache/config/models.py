"""Models that a server offers, and the choice of one for the model name of a request."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from mlxcache.config.sizes import parse_size
from mlxcache.errors import ConfigError

Keep = Literal["always", "demand"] | float
"""Time for which an unused model stays loaded.

"always": it is never unloaded. "demand": until another model needs its memory. A number: that many
seconds, or until another model needs its memory.
"""

DEMO_ID = "mlxcache-demo"
"""Name of the built-in demo model, as clients see it."""

_SNAPSHOT = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that a server offers, with the settings of its own.

    `model`: path or Hub id, None for the built-in demo. `name`: key of its table in config.toml,
    None without one. `aliases`: further names that requests may use. `keep`: how long it stays
    loaded while unused, None for the server's default. `ram`: the most that its weights and KV may
    take together, as a size or a percentage of `--ram`, None for no limit of its own. The other
    fields are those of `Settings`; one that is None or empty leaves the server's setting in force.
    `id`, derived from `model`: the name that clients see if there is no `name`.

    Raises ConfigError if the demo is combined with an adapter or a draft model.
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
        """Name under which the server lists the model: `name`, or `id` without one."""
        return self.name or self.id

    def share_of(self, budget: int) -> int | None:
        """Return the limit in bytes of the model's weights and KV together; None without `ram`."""
        return None if self.ram is None else parse_size(self.ram, total=budget)

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names that requests may use: the label, the id and the aliases."""
        return tuple(dict.fromkeys((self.label, self.id, *self.aliases)))


@dataclass(frozen=True, slots=True)
class Route:
    """Model for requests whose model name matches a pattern.

    `pattern`: shell pattern with `*`, `?` and `[...]`, compared without regard to case. `name`: a
    name of the model, as in `ModelEntry.names`.
    """

    pattern: str
    name: str


def match_model(
    requested: str | None, entries: Sequence[ModelEntry], routes: Sequence[Route] = ()
) -> int:
    """Return the index in `entries` of the model for a request that names `requested`.

    `requested` is compared with the names of all entries, then with their ids, then with their
    aliases; then with all of these without regard to case; then with the patterns of `routes`, of
    which the first that matches counts. All other requests get the first entry, the default model.
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
    """Raise ConfigError if two models have the same name or alias."""
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
    """Raise ConfigError if the `name` of a route is no name, id or alias of one of `entries`."""
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
