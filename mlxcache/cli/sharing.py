"""A server's place in its cache folder: others see that it runs, and where."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from mlxcache.config import Settings
from mlxcache.errors import StoreError
from mlxcache.store.lock import InUse, serving

log = logging.getLogger("mlxcache.server")


@contextmanager
def sharing(settings: Settings, url: str) -> Iterator[None]:
    """Held as long as a server runs. A folder that cannot be written is no reason not to serve.

    Raises InUse while a command changes the files that this server is to use.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(serving(settings.cache_dir, url, settings.model or "the demo"))
        except StoreError as error:
            if isinstance(error, InUse) and settings.disk != "off":
                raise
            log.warning("commands will not find this server by its folder: %s", error)
        yield
