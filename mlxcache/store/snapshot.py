"""Snapshots: one session in one portable safetensors file. The format is in docs/snapshots.md.

Nothing here holds a session in RAM: files are read and written in ranges of a few MiB.
"""

from mlxcache.store.snapshot_check import format_of
from mlxcache.store.snapshot_info import LeafInfo, Progress, SessionInfo, Spec
from mlxcache.store.snapshot_read import Snapshot, owned, read_snapshot, restore
from mlxcache.store.snapshot_write import Export
from mlxcache.store.store import Store

__all__ = [
    "Export",
    "LeafInfo",
    "Progress",
    "SessionInfo",
    "Snapshot",
    "Spec",
    "export",
    "format_of",
    "owned",
    "read_snapshot",
    "restore",
]


def export(store: Store, session: SessionInfo, owner: str | None = None) -> Export:
    """A snapshot of an owner's `session` with what is on disk of it, read and verified here.

    What is damaged or evicted is left out, and computed again where the snapshot is used; token ids
    are always whole. Raises StoreError.
    """
    return Export(store, session, owner)
