"""Formats that requests can require of the reply, made from JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mlxcache.types import OutputFormat


def format_of_schema(schema: Mapping[str, Any], param: str) -> OutputFormat:
    """Return the format for JSON that is valid by `schema`, keeping the order of the schema's keys.

    `param` is the field of the request that holds the schema, for errors.
    """
    return OutputFormat("json_schema", msgspec.json.encode(schema).decode(), param)
