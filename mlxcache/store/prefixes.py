"""What sessions do to prefixes on disk: look at another model's, pin them, remove them."""

from __future__ import annotations

from mlxcache.store.core import Core
from mlxcache.store.sessions import Sessions
from mlxcache.store.store import Store
from mlxcache.types import Tokens


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


def forget_prefix(store: Store, ids: Tokens, keep: int) -> int:
    """Remove the files that hold nothing but `ids` beyond the first `keep`; how many tokens went.

    Files that build on them go too. A file that also holds what is to be kept stays whole.
    Raises StoreError.
    """
    found = store.find(ids, touch=False)
    checkpoints = [saved.id for saved in found.checkpoints if saved.position > keep]
    runs = [piece for piece in found.pieces if piece.first >= keep]
    for id in (*checkpoints, *(piece.id for piece in reversed(runs))):
        store._core.drop(id, corrupt=False)
    return sum(piece.end - piece.start for piece in runs)


def delete_session(store: Store, sessions: Sessions, id: str) -> None:
    """Remove a session and the files that no other session needs. Raises NotFound, StoreError."""
    session, leaves = sessions.get(id), sessions.leaves(id)
    store.pin(id, [])
    sessions.delete(id)
    seen = viewing(store, session.namespace)
    for leaf in leaves:
        needed = sessions.needed(session.namespace, leaf.ids)
        if needed < len(leaf.ids):
            forget_prefix(seen, leaf.ids, needed)
