"""Recorded bodies of clients. Their texts are shortened to a few words.

A recording has a `script` (see `tests.scripted`) and `requests`: path, headers and body. A request
that extends an earlier one has that one's number (`like`), how many of its messages it repeats
(`same`), and what it has besides.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_recording(name: str) -> dict[str, Any]:
    """The recording in the file `name` beside this module, with each request's whole body."""
    found = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    whole: list[dict[str, Any]] = []
    for one in found["requests"]:
        whole.append(_extended(whole[one["like"]], one) if "like" in one else one)
    return {"script": found["script"], "requests": whole}


def _extended(before: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """A request that extends `before`."""
    messages = [*before["body"]["messages"][: one["same"]], *one["body"]["messages"]]
    body = before["body"] | one["body"] | {"messages": messages}
    return before | {"like": one["like"], "body": body}
