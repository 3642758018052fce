"""Session ids for a shell's completion, read without numpy and the store's lock files."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from mlxcache.store.database import NAME, connect_read_only

_WAIT_S = 0.1
_MOST = 200


def list_session_names(folder: Path) -> list[tuple[str, str]]:
    """Return (id, name) of the sessions in the store folder, most recently used first.

    If a session has no name, its title is returned instead, else its label, else "". At most 200
    sessions are returned, and none if the store is missing or cannot be read, because shell
    completion cannot show an error. Blocks for at most 0.1 s while another process writes.
    """
    path = (folder / NAME).resolve()
    try:
        with closing(connect_read_only(path, _WAIT_S)) as db:
            rows = db.execute(
                "SELECT id, coalesce(nullif(name, ''), title, label, '') FROM sessions "
                "ORDER BY last_used_at DESC LIMIT ?",
                (_MOST,),
            )
            return [(str(id), str(name)) for id, name in rows]
    except (sqlite3.Error, OSError):
        return []
