"""Cache kinds of every model of the installed mlx-lm, and their table in the documentation.

`python -m tests.toys.classify docs/configuration.md` writes the table into that page, between
the two comments that mark its place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.processors import PROCESSORS

from mlxcache.errors import ModelError
from mlxcache.model import kv
from mlxcache.model.adapters import Adapter, Sliced, adapter_of, class_name, parts_of
from mlxcache.model.quantised import check_classes
from tests.toys import tiny

BEGIN = "<!-- the table is made by `bin/model-families` -->"
END = "<!-- end of the table -->"

REMARKS = {
    "deepseek_v41": "mlx-lm rounds KV to 4 and 8 bits, so a tiny difference grows: "
    "replies may depend on the chunks",
    "olmo": "mlx-lm fails if it gets more than one token at once",
    "phi3small": "in mlx-lm, a token attends to later ones of its group of 32 or 64: "
    "replies depend on the chunks",
    "plamo3": "in mlx-lm, windows are longer within a chunk: replies depend on the chunks",
}
"""Remarks on mlx-lm's own behaviour that affects replies, by module."""


@dataclass(frozen=True, slots=True)
class Family:
    """Cache kinds of the models of one module.

    `classes`: mlx-lm's, in the order of the layers; `verbs`: kinds of reuse of their slots;
    `unknown`: classes that have no adapter; `batches`: whether several rows can be decoded
    together; `quantised`: whether KV may have fewer bits, None where that was not tried.
    """

    module: str
    classes: tuple[str, ...]
    verbs: frozenset[str]
    unknown: tuple[str, ...]
    batches: bool
    quantised: bool | None


def families() -> Iterator[Family]:
    """One after the other, in alphabetical order. Seconds in all."""
    with _not_compiled():
        for name in tiny.module_names():
            yield classified(name)


def classified(name: str) -> Family:
    """Classify the models of a module, by a tiny one."""
    model = tiny.make_tiny(name)
    fed = name not in tiny.UNFED
    layout = kv.survey(model, evaluate=fed) if fed else None
    raw = make_prompt_cache(model)
    slots = kv.flatten(kv.make_caches(model))
    if layout is not None:  # what a model never fills is of no account
        kept = {
            *layout.linear,
            *(i for i, slot in enumerate(slots) if not isinstance(adapter_of(slot), Sliced)),
        }
        slots = [slot for i, slot in enumerate(slots) if i in kept]
    adapters = [adapter_of(slot) for slot in slots]
    return Family(
        name,
        tuple(dict.fromkeys(map(_class, raw))),
        frozenset(_verb(adapter) for adapter in adapters if adapter is not None),
        tuple(sorted({class_name(slot) for slot in slots if adapter_of(slot) is None})),
        layout.batchable if layout is not None else _batchable(adapters),
        _quantised(model, fed),
    )


def _verb(adapter: Adapter) -> str:
    if isinstance(adapter, Sliced):
        return "slice"
    return "window" if adapter.cuts else "checkpoint"


def _batchable(adapters: Sequence[Adapter | None]) -> bool:
    return all(adapter is not None and adapter.batchable for adapter in adapters)


def _class(cache: Any) -> str:
    parts = parts_of(cache)
    name = type(cache).__name__
    return name if parts is None else f"{name}({', '.join(map(_class, parts))})"


def _quantised(model: nn.Module, fed: bool) -> bool | None:
    try:
        if not fed:
            check_classes(kv.make_caches(model), 8)
            return None
        kv.survey(model, kv_bits=8)
    except ModelError:
        return False
    return True


@contextmanager
def _not_compiled() -> Iterator[None]:
    """Compiling takes longer than all that is computed here."""
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def reuse(family: Family) -> str:
    """Describe the reuse of a conversation's beginning, in words."""
    if family.unknown:
        return "nothing: the class is unknown"
    if "checkpoint" in family.verbs:
        return "from checkpoints"
    return (
        "any token; from checkpoints if memory is short"
        if "window" in family.verbs
        else "any token"
    )


def table(found: Iterable[Family]) -> str:
    """The families in Markdown, one row for those that are alike, and remarks below it."""
    rows: dict[tuple[str, ...], list[str]] = {}
    remarks = []
    for family in found:
        classes = ", ".join(f"`{name}`" for name in sorted(family.classes))
        bits = {True: "yes", False: "no", None: "not tried"}[family.quantised]
        batches = "yes" if family.batches else "no"
        rows.setdefault((classes, reuse(family), batches, bits), []).append(f"`{family.module}`")
        remark = REMARKS.get(family.module, "")
        if family.module in PROCESSORS:
            remark = "; ".join(filter(None, [remark, "takes [images](http-api.md#images)"]))
        if remark:
            remarks.append(f"- `{family.module}`: {remark}")
    lines = [
        f"As of mlx-lm {version('mlx-lm')}:",
        "",
        "| classes | reused from | batches | `--kv-bits` | models |",
        "|---|---|---|---|---|",
        *(f"| {' | '.join(cells)} | {', '.join(names)} |" for cells, names in rows.items()),
        "",
        *remarks,
    ]
    return "\n".join(lines)


def with_table(page: str, made: str) -> str:
    """`page` with the table `made` in its place. Raises ValueError where it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no place for the table, between {BEGIN} and {END}")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


def main() -> None:
    """Write the table into the page that is given."""
    page = Path(sys.argv[1])
    page.write_text(
        with_table(page.read_text(encoding="utf-8"), table(families())), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
