"""Figures of a run, as JSON and as a table."""

from __future__ import annotations

import platform
import time
from typing import Any

import psutil

from tests.soak.checks import first_after_quarter
from tests.soak.run import Soak

LOSSES = {"sessions lost": "session lost", "wrong tokens": "wrong tokens", "hangs": "hang"}


def figures(soak: Soak) -> dict[str, Any]:
    """Return all figures of a run, in bytes, seconds and counts."""
    ledger = soak.ledger
    worst = max(ledger.overshoots, key=lambda over: over.nbytes, default=None)
    return {
        "seed": soak.seed,
        "families": list(soak.families),
        "seconds": round(time.monotonic() - soak.began),
        "machine": f"{platform.system()} {platform.machine()}, {psutil.cpu_count()} cores",
        "rounds": soak.rounds,
        "requests": dict(ledger.requests),
        "tokens": dict(ledger.tokens),
        "ends": dict(ledger.ends),
        "faults": dict(ledger.faults),
        "replies_verified": ledger.checked,
        **{name.replace(" ", "_"): ledger.kinds[kind] for name, kind in LOSSES.items()},
        "violations": dict(ledger.kinds),
        "memory": {name: _memory(one.rests) for name, one in soak.steady.items() if one.rests},
        "largest_overshoot_bytes": worst.nbytes if worst else None,
        "largest_overshoot_of": worst.of if worst else None,
        "largest_overshoot_with_200MB": max(
            (over.share for over in ledger.overshoots if over.of.endswith("200MB")), default=None
        ),
    }


def _memory(rests: list[Any]) -> dict[str, Any]:
    quarter, last = first_after_quarter(rests), rests[-1]
    return {
        "first_bytes": rests[0].nbytes,
        "quarter_bytes": quarter.nbytes,
        "end_bytes": last.nbytes,
        "most_bytes": max(rest.nbytes for rest in rests),
        "files": [rests[0].files, last.files],
        "threads": [rests[0].threads, last.threads],
        "series": [[round(rest.at), rest.nbytes] for rest in rests],
    }


def table(found: dict[str, Any]) -> str:
    """Format the figures as lines of two columns."""
    lines: list[tuple[str, str]] = []
    for name, value in found.items():
        words = name.replace("_", " ")
        if name == "memory":
            lines += [(f"memory, {one}", _held(held)) for one, held in value.items()]
        elif isinstance(value, dict):
            lines.append((words, ", ".join(f"{k} {v}" for k, v in sorted(value.items())) or "0"))
        elif isinstance(value, float):
            lines.append((words, f"{value:.1%}"))
        else:
            lines.append((words, str(value)))
    width = max(len(words) for words, _ in lines)
    return "\n".join(f"{words:<{width}}  {value}" for words, value in lines)


def _held(held: dict[str, Any]) -> str:
    at = [f"{held[f'{when}_bytes'] / 1e6:.0f} MB" for when in ("quarter", "end", "most")]
    files, threads = held["files"], held["threads"]
    return (
        f"{at[0]} at a quarter, {at[1]} at the end, {at[2]} at most; "
        f"files {files[0]} to {files[1]}, threads {threads[0]} to {threads[1]}"
    )
