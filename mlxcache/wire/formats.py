"""Formats that a reply may be required to have, for both APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mlxcache.types import OutputFormat


def format_of_schema(schema: Mapping[str, Any], param: str) -> OutputFormat:
    """Return the format of JSON that is valid by `schema`; the order of its keys is kept."""
    return OutputFormat("json_schema", msgspec.json.encode(schema).decode(), param)
