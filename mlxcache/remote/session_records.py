"""Small records of sessions, so that a conversation is the same session on every server.

A record is named after a digest of the conversation key, which identifies the conversation in the
table of sessions too; see `store.leaves.conversation_key_tokens`. A record is read while the
conversation's first request on a server runs, and no request waits for it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated

import msgspec

from mlxcache.errors import RemoteUnavailable
from mlxcache.lru import LRU
from mlxcache.remote import grid
from mlxcache.remote.figures import Counts
from mlxcache.remote.objects import Objects
from mlxcache.remote.upload import Uploader
from mlxcache.store.reply_rows import KEY_BYTES
from mlxcache.store.session_rows import Origin, Session
from mlxcache.store.sessions import ID
from mlxcache.store.snapshot_format import Name
from mlxcache.typed import decode

log = logging.getLogger("mlxcache.engine")

VERSION = 1

MOST_BYTES = 1 << 17
"""Most bytes of a record."""

MOST_KNOWN = 4096
"""Most conversations that are remembered."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `Session` that servers exchange. `version`: that of the record's format."""

    version: int = VERSION
    id: str
    label: Name | None
    name: Name | None
    title: Name | None
    client: Name | None
    created_at: Annotated[float, msgspec.Meta(ge=0)]


class SharedSessions:
    """Exchange of session records through the remote.

    Methods may be called on any thread and do not block. `submit(action)` runs an action on a
    thread that may block. `label`: that of the model, for the log.
    """

    def __init__(
        self,
        objects: Objects,
        uploader: Uploader,
        counts: Counts,
        namespace: str,
        submit: Callable[[Callable[[], None]], object],
        *,
        label: str = "unnamed",
    ):
        self._label = label
        self._namespace = namespace
        self._objects, self._uploader, self._counts = objects, uploader, counts
        self._submit = submit
        self._uploaded: LRU[str, SessionRecord] = LRU(MOST_KNOWN)
        self._found: LRU[str, tuple[SessionRecord | None]] = LRU(MOST_KNOWN)

    def look_up(self, owner: str | None, key: bytes) -> None:
        """Begin to read the record of a conversation, for `find`, unless that was done before.

        `owner`: the owner of the request. `key`: digest of the conversation key; if the server has
        several API keys, of its ids as changed by `mlxcache.owner.own_ids`.
        """
        name = self._name(owner, key)
        if self._found.get(name) is not None or not self._objects.available:
            return
        self._found.put(name, (None,))
        with suppress(RuntimeError):  # the server is stopping
            self._submit(lambda: self._read(name))

    def _read(self, name: str) -> None:
        try:
            data = self._objects.get(name, most=MOST_BYTES)
        except RemoteUnavailable as error:
            log.debug(
                "model %s: session record could not be read from the remote: %s: %s",
                *(self._label, name, error),
            )
            self._found.pop(name)
            return
        if data is None:
            return
        try:
            found = decode(SessionRecord, data)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            self._counts.add("corrupt")
            log.warning(
                "model %s: remote object has wrong content, and is not used: %s: %s",
                *(self._label, name, error),
            )
            return
        if found.version == VERSION and ID.fullmatch(found.id):
            self._found.put(name, (found,))

    def find(self, owner: str | None, key: bytes) -> Origin | None:
        """Return the session to which a conversation belongs, by its record in the remote."""
        record = (self._found.get(self._name(owner, key)) or (None,))[0]
        return None if record is None else Origin(record.id, record.name, record.created_at)

    def share(self, session: Session, key: bytes) -> None:
        """Queue the record of a session to be uploaded, if it changed since it was last queued."""
        record = SessionRecord(
            id=session.id,
            label=session.label,
            name=session.name,
            title=session.title,
            client=session.client,
            created_at=session.created_at,
        )
        name = self._name(session.owner, key)
        if self._uploaded.get(name) == record:
            return
        self._uploaded.put(name, record)
        self._found.put(name, (record,))
        self._uploader.add_record(name, lambda: self._put(name, record))

    def _put(self, name: str, record: SessionRecord) -> None:
        data = msgspec.json.encode(record)
        self._objects.put(name, data)
        self._counts.add("uploaded_objects")
        self._counts.add("uploaded_bytes", len(data))

    def _name(self, owner: str | None, key: bytes) -> str:
        words = b"" if owner is None else owner.encode()
        digest = hashlib.blake2b(key + words, digest_size=KEY_BYTES, person=b"mlxcache session")
        return f"{grid.VERSION}/{self._namespace}/session/{digest.hexdigest()}"
