"""Formats that a reply may be required to have, for both APIs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from mlxcache.errors import BadRequest
from mlxcache.types import Chat, OutputFormat


def format_of_schema(schema: Mapping[str, Any], param: str) -> OutputFormat:
    """Return the format of JSON that is valid by `schema`; the order of its keys is kept."""
    return OutputFormat("json_schema", msgspec.json.encode(schema).decode(), param)


def check_not_continued(chat: Chat, form: OutputFormat | None) -> None:
    """Raise BadRequest if a message is to be continued in a format.

    The format is that of a whole reply, and the message may begin differently.
    """
    if form is not None and chat.continue_final:
        raise BadRequest(
            f"`{form.param}` is the format of a whole reply: the assistant's last message cannot "
            "be continued in it. Remove one of the two.",
            param=form.param,
        )
