"""What sessions do to prefixes on disk: look at another model's, pin them, remove them."""

from __future__ import annotations

from mlxcache.store import index
from mlxcache.store.core import Core
from mlxcache.store.finite import are_numbers
from mlxcache.store.found import Piece, Saved
from mlxcache.store.sessions import Sessions
from mlxcache.store.store import Store
from mlxcache.types import Tokens

MOST_ASKED = 50
"""Leaves that are asked what they need; if more share a beginning, all of its files are kept."""


def viewing(store: Store, namespace: str) -> Store:
    """The same folder seen as another model's; it is the first one's to close."""
    if namespace == store.namespace:
        return store
    core = store._core
    return Store(Core(core.folder, core.database, core.owner, core.space, namespace))


def pin(store: Store, sessions: Sessions, id: str, *, pinned: bool) -> None:
    """Evict what is on disk of a session last, or not any more. Raises NotFound and StoreError."""
    if not pinned:
        store.pin(id, [])
        return
    paths = [leaf.ids for leaf in sessions.leaves(id)]
    viewing(store, sessions.get(id).namespace).pin(id, paths)


def forget_prefix(store: Store, sessions: Sessions, ids: Tokens) -> int:
    """Remove the files of `ids` that no session needs; how many went. Raises StoreError.

    A file that also holds tokens of a session stays whole.
    """
    others, files = sessions.sharing(store.namespace, ids), _files(store, ids)
    if len(others) > MOST_ASKED:
        shared = max(others.values())
        needed = {file.id for file in files if _start(file) < shared}
    else:
        needed = {file.id for leaf in others for file in _files(store, sessions.ids(leaf))}
    gone, left = 0, [file.id for file in files]
    while left:
        id = left.pop()
        with store.database.read() as connection:
            rows = index.below(connection, id)
        if rows and not {row.id for row in rows} & needed:
            gone += store._core.drop(id, corrupt=False)
            # what it was built on may have stayed for its sake alone
            left += [row.parent for row in rows if row.id == id and row.parent is not None]
    return gone


def forget_beyond(store: Store, ids: Tokens, keep: int) -> None:
    """Remove what is on disk of `ids` beyond `keep`, which is no numbers, and all built on it.

    A file that others share, who went another way within it or behind it, stays if it is numbers:
    they computed it. Raises StoreError.
    """
    while beyond := [file for file in _files(store, ids) if _end(file) > keep]:
        own = {file.id for file in beyond}
        wrong = [file for file in beyond if not _is_of_others(store, file, own, keep)]
        for file in wrong:
            store._core.drop(file.id, corrupt=False)
        if not wrong:
            break


def _is_of_others(store: Store, file: Piece | Saved, own: set[int], keep: int) -> bool:
    if isinstance(file, Saved):
        return False
    with store.database.read() as connection:
        behind = {row.id for row in index.below(connection, file.id)} - own
    shared = bool(behind) or file.end < file.last
    return shared and are_numbers(file.path, max(0, keep - file.first))


def _end(file: Piece | Saved) -> int:
    """The last token of what was looked for that `file` holds; others may follow it there."""
    return file.position if isinstance(file, Saved) else file.end


def _start(file: Piece | Saved) -> int:
    """The first token that a session must hold beyond to need `file`."""
    return file.position - 1 if isinstance(file, Saved) else file.first


def _files(store: Store, ids: Tokens) -> list[Piece | Saved]:
    found = store.find(ids, touch=False)
    return [*found.pieces, *found.checkpoints]


def delete_session(store: Store, sessions: Sessions, id: str) -> None:
    """Remove a session and the files that no other session needs. Raises NotFound, StoreError."""
    session, leaves = sessions.get(id), sessions.leaves(id)
    store.pin(id, [])
    sessions.delete(id)
    for leaf in leaves:
        forget_prefix(viewing(store, session.namespace), sessions, leaf.ids)
