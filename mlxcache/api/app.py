"""The HTTP application as a value: routes, error handlers, middleware."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware

from mlxcache.api import anthropic, cache, dashboard, live, metrics, openai, sessions, status
from mlxcache.api.access import (
    CheckMiddleware,
    Keyring,
    OriginMiddleware,
    RefusalLog,
    check_key,
    check_page,
)
from mlxcache.api.errors import HANDLERS
from mlxcache.api.http import ApiSettings, Deps
from mlxcache.api.middleware import FallbackMiddleware, RequestMiddleware

if TYPE_CHECKING:
    from mlxcache.engine.engine import Engine


def create_app(engine: Engine, settings: ApiSettings | None = None) -> Starlette:
    """Build the HTTP application over `engine`, which may still be loading its model.

    Requests of web pages are refused, except from this server's own pages and
    `settings.origins`.
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
        middleware=_middleware(deps),
        exception_handlers=dict(HANDLERS),
    )


def _middleware(deps: Deps) -> list[Middleware]:
    """Middleware from the outermost inwards."""
    settings, refusals = deps.settings, RefusalLog()
    keys = Keyring(settings.api_key, settings.owned_keys)
    # Pages are refused before CORS adds headers. A preflight carries no key, so CORS comes before
    # the keys; an allowed page must be able to read a 500, so CORS comes before the fallback.
    cors = [Middleware(OriginMiddleware, settings=settings)] if settings.origins else []
    return [
        Middleware(RequestMiddleware, error_counts=deps.error_counts),
        Middleware(CheckMiddleware, check=partial(check_page, settings), refusals=refusals),
        *cors,
        Middleware(FallbackMiddleware),
        Middleware(CheckMiddleware, check=partial(check_key, keys), refusals=refusals),
    ]
