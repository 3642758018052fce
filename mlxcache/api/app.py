"""The application as a value: routes, errors as a mapping, one middleware."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware

from mlxcache.api import anthropic, cache, dashboard, live, metrics, openai, sessions, status
from mlxcache.api.errors import HANDLERS
from mlxcache.api.http import ApiSettings, Deps
from mlxcache.api.middleware import RequestMiddleware

if TYPE_CHECKING:
    from mlxcache.engine.engine import Engine


def create_app(engine: Engine, settings: ApiSettings | None = None) -> Starlette:
    """The HTTP server over `engine`, which may still be loading its model.

    Answers no cross-origin request: a web page that a person visits is no client of this server.
    """
    settings = settings or ApiSettings()
    deps = Deps(engine, settings)
    return Starlette(
        routes=[
            *openai.routes(deps),
            *anthropic.routes(deps),
            *sessions.routes(deps),
            *cache.routes(deps),
            *status.routes(deps),
            *live.routes(deps),
            *dashboard.routes(),
            *metrics.routes(deps),
        ],
        middleware=[Middleware(RequestMiddleware, settings=settings, refusals=deps.refusals)],
        exception_handlers=dict(HANDLERS),
    )
