"""Endpoints as values: a handler, and what the OpenAPI document says of its requests and replies.

The endpoints of a module are its mapping `ENDPOINTS`, from `METHOD PATH` to an `Operation`. Routes,
allowed methods and the document are all made from these.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mlxcache.api.http import Deps
from mlxcache.errors import BadRequest

Handler = Callable[[Deps, Request], Awaitable[Response]]
Schema = dict[str, Any]

JSON, EVENTS, BINARY = "application/json", "text/event-stream", "application/octet-stream"


# -- query parameters ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """A parameter of the query string that is any text."""

    name: str

    @property
    def schema(self) -> Schema:
        return {"type": "string"}


@dataclass(frozen=True, slots=True)
class Word:
    """A parameter of the query string that is one of `words`, by default the first."""

    name: str
    words: tuple[str, ...]

    @property
    def schema(self) -> Schema:
        return {"type": "string", "enum": list(self.words), "default": self.words[0]}

    def read(self, request: Request) -> str:
        word = request.query_params.get(self.name, self.words[0])
        if word not in self.words:
            expected = " or ".join(map(repr, self.words))
            raise BadRequest(f"`{self.name}` must be {expected}.", param=self.name)
        return word


@dataclass(frozen=True, slots=True)
class Number:
    """A parameter of the query string that is a whole number from `least` to `most`."""

    name: str
    default: int
    least: int = 1
    most: int = 2**63 - 1

    @property
    def schema(self) -> Schema:
        limits = {"minimum": self.least, "maximum": self.most}
        return {"type": "integer", **limits, "default": self.default}

    def read(self, request: Request) -> int:
        text = request.query_params.get(self.name, str(self.default))
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise BadRequest(f"`{self.name}` must be a whole number.", param=self.name)
        if len(text) > 64 or not self.least <= int(text) <= self.most:
            message = f"`{self.name}` must be from {self.least} to {self.most}."
            raise BadRequest(message, param=self.name)
        return int(text)


# -- endpoints -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operation:
    """One endpoint: its handler, whose docstring describes it, and the rest of its description.

    `optional`: the body may be empty. `raw`: content types of a body that is not, or not always,
    JSON. `answer`: schema of its JSON response, `types` the content types. `also`: further statuses
    that are not errors.
    """

    handler: Handler
    body: type[msgspec.Struct] | None = None
    answer: str = "Object"
    optional: bool = False
    raw: tuple[str, ...] = ()
    query: tuple[Text | Word | Number, ...] = ()
    types: tuple[str, ...] = (JSON,)
    status: int = 200
    also: tuple[int, ...] = ()
