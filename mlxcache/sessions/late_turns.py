"""Turns that could not be written to the table of sessions yet, and a table that shows them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlxcache.common_prefix import common_length
from mlxcache.errors import StoreError
from mlxcache.store.sessions import Sessions, Turn

log = logging.getLogger("mlxcache.engine")

MAX_LATE = 64
"""Turns kept for a retry. Their token ids stay in RAM meanwhile."""


@dataclass(slots=True, eq=False)
class LateTurn:
    """A turn and the id of its request.

    `session`: the id of its session, once the turn is in the copy `LateTurns.table`, else None.
    """

    request: str
    turn: Turn
    session: str | None = None

    def show_in(self, copy: Sessions) -> None:
        """Record the turn in `copy`, a copy of the table of sessions. Raises StoreError.

        Sets the attribute `session` of this turn to the id of its session there.
        """
        self.session = copy.record_turn(self.turn, self.session)


class LateTurns:
    """Turns that are not in the table of sessions on disk yet, in order; `write` writes them.

    Used on one thread, except `table`. While some turns could not be written, `table` is a copy of
    the table `sessions` in memory that has them too, so that their conversations are listed. If a
    turn begins a new session, the id that the session gets in the copy is also used when the turn
    is written to disk.
    """

    def __init__(self, sessions: Sessions):
        self._sessions = sessions
        self._turns: list[LateTurn] = []
        self._copy: Sessions | None = None
        self._before: Sessions | None = None

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def table(self) -> Sessions:
        """The table to read: the one on disk, or a copy that also has these turns. Any thread."""
        return self._copy or self._sessions

    def add(self, request: str, turn: Turn) -> None:
        """Append a turn to those that the next `write` writes to the table of sessions.

        `request`: id of its request. If `MAX_LATE` turns wait already, one of them is removed
        unwritten: the oldest turn that a later turn continues, or the oldest of all if there is
        none.
        """
        if len(self._turns) == MAX_LATE:
            del self._turns[self._superseded()]
        self._turns.append(LateTurn(request, turn))

    def _superseded(self) -> int:
        """Index of the oldest turn that a later turn continues; 0 if there is none."""
        for index, one in enumerate(self._turns):
            ids = one.turn.ids
            for later in self._turns[index + 1 :]:
                same = later.session == one.session and len(later.turn.ids) >= len(ids)
                if same and common_length(later.turn.ids, ids) == len(ids):
                    return index
        return 0

    def write(self, record: Callable[[LateTurn], None]) -> None:
        """Call `record` with each waiting turn, in order, to write it to the table on disk.

        Turns that `record` has written no longer wait. If it raises StoreError, that is raised, and
        the other turns go on waiting and are shown in the copy `table`.
        """
        try:
            while self._turns:
                record(self._turns[0])
                del self._turns[0]
        except StoreError:
            self._show()
            raise
        self._set_copy(None)

    def shown(self) -> list[tuple[str, str]]:
        """Pairs of request id and session id of those turns that are in the copy `table`."""
        return [(one.request, one.session) for one in self._turns if one.session is not None]

    def sessions(self) -> set[str]:
        """Ids of the sessions of those turns that are in the copy `table`."""
        return {one.session for one in self._turns if one.session is not None}

    def forget(self, sessions: set[str]) -> None:
        """Remove the waiting turns of sessions with these ids, without writing them."""
        self._turns = [one for one in self._turns if one.session not in sessions]

    def refresh(self) -> None:
        """Make `table` a new copy of the table on disk, with these turns added.

        Call after this process has changed the table on disk. Does nothing if `table` is the one on
        disk.
        """
        if self._copy is not None:
            self._set_copy(None)
            self._show()

    def close(self) -> None:
        """Close the copies of the table in memory; `table` must not be read any more."""
        self._set_copy(None)
        self._set_copy(None)

    def _show(self) -> None:
        try:
            if self._copy is not None:
                self._record(self._copy, [one for one in self._turns if one.session is None])
                return
            copy = self._sessions.copy()
            try:
                self._record(copy, self._turns)
            except BaseException:
                copy.close()
                raise
            self._set_copy(copy)
        except StoreError as error:
            log.debug("session lists lack turns that are not on disk yet: %s", error)

    def _record(self, copy: Sessions, turns: Sequence[LateTurn]) -> None:
        for one in turns:
            one.show_in(copy)

    def _set_copy(self, copy: Sessions | None) -> None:
        """Replace the copy that `table` returns; None makes `table` return the table on disk.

        Threads may still read the replaced copy, so it is closed only by the next call.
        """
        if copy is self._copy is None:
            before, self._before = self._before, None
        else:
            before, self._before = self._before, self._copy
        self._copy = copy
        if before is not None:
            before.close()
