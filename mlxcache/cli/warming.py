"""What `serve --warm FILE` does: prefixes are computed at the start, one after another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from mlxcache.api.cache import warm
from mlxcache.engine.engine import Engine
from mlxcache.errors import MlxcacheError
from mlxcache.owner import OWNER, owner_of

log = logging.getLogger("mlxcache.server")


async def warm_files(engine: Engine, files: Sequence[Path], keys: Sequence[str] = ()) -> None:
    """Compute what `files` hold; one that cannot be is logged, and the next one's turn comes.

    For the owner of each of `keys`, if there are any: none reuses what is another's.
    """
    for key, file in product(keys or (None,), files):
        OWNER.set(owner_of(key) if key is not None else None)
        try:
            done = await warm(engine, await asyncio.to_thread(file.read_bytes))
        except MlxcacheError as error:
            log.warning("%s is not warm: %s", file, error)
        except OSError as error:
            log.warning("%s is not warm: it cannot be read: %s", file, error.strerror)
        else:
            log.info(
                "%s is warm: %d tokens, %d of them computed in %.1f s",
                *(file, done["prompt_tokens"], done["fed_tokens"], done["seconds"]),
            )
