"""The figures of several models as one body of `GET /v1/cache`."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcache.engine.metrics import COUNTED, GUESSES, SIZES, SOURCES, add_up

OPEN = {
    "used_bytes": 70,
    "limit_bytes": 100,
    "written_bytes": 40,
    "written_tokens": 4,
    "evicted_files": 1,
    "state": "ok",
    "reason": None,
}
NONE = {"used_bytes": 0, "limit_bytes": 0, "reason": "its folder cannot be opened"}


def figures(disk: dict[str, Any]) -> dict[str, Any]:
    return {
        **dict.fromkeys(SIZES, 1),
        **{name: {"some": 1} for name in COUNTED},
        "tokens": {"cached": 10},
        "ram": {"used_bytes": 5, "buffers": 1},
        "sessions": 3,
        "guesses": {name: dict.fromkeys(SOURCES, 0) for name in GUESSES},
        "queue": {"waiting": 0},
        "disk": disk,
    }


@pytest.mark.parametrize("disks", [(OPEN, NONE), (NONE, OPEN)])
def test_a_model_without_a_disk_tier_hides_that_of_no_other(disks: tuple[dict[str, Any], ...]):
    """The folder of one model could not be opened."""
    found = add_up([figures(one) for one in disks], {"limit_bytes": 9, "high_water_bytes": 8}, {})
    assert (found["disk"]["used_bytes"], found["disk"]["written_bytes"]) == (70, 40)
    assert (found["disk"]["state"], found["disk"]["written_per_cached_token"]) == ("ok", 2.0)


def test_what_each_model_wrote_is_added():
    stopped = OPEN | {"state": "suspended", "reason": "the disk is full"}
    memory = {"limit_bytes": 9, "high_water_bytes": 8}
    found = add_up([figures(OPEN), figures(stopped)], memory, {"withheld": 2})
    assert (found["disk"]["used_bytes"], found["disk"]["written_bytes"]) == (70, 80)
    assert (found["disk"]["state"], found["disk"]["reason"]) == ("suspended", "the disk is full")
    assert (found["ram"]["used_bytes"], found["ram"]["withheld_bytes"]) == (10, 2)
    assert add_up([figures(NONE)] * 2, memory, {})["disk"] == NONE
