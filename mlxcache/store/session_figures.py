"""What sessions gained, as rows: requests, waiting, tokens that were reused, and the time saved."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

SCHEMA = """
CREATE TABLE IF NOT EXISTS session_figures (
    session TEXT PRIMARY KEY REFERENCES sessions (id) ON DELETE CASCADE,
    requests INTEGER NOT NULL, first_tokens INTEGER NOT NULL, first_token_s REAL NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    restored_tokens INTEGER NOT NULL, fed_tokens INTEGER NOT NULL,
    generated_tokens INTEGER NOT NULL, saved_tokens INTEGER NOT NULL, saved_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS prefill_paces (
    namespace TEXT NOT NULL, range INTEGER NOT NULL, token_s REAL NOT NULL,
    PRIMARY KEY (namespace, range)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """Sums over a session's requests; seconds and tokens.

    `first_tokens` of the requests drew a token, after `first_token_s` in all. `saved_s` is what
    computing `saved_tokens` of the cached ones would have taken: those for which the speed of
    prefill was known.
    """

    requests: int = 0
    first_tokens: int = 0
    first_token_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    fed_tokens: int = 0
    generated_tokens: int = 0
    saved_tokens: int = 0
    saved_s: float = 0.0

    def as_object(self) -> dict[str, Any]:
        """What the API shows: the average wait for a first token, null for what nobody knows."""
        average = self.first_token_s / self.first_tokens if self.first_tokens else None
        known = bool(self.saved_tokens) or not self.cached_tokens
        return {
            "requests": self.requests,
            "first_token_s": None if average is None else round(average, 4),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "restored_tokens": self.restored_tokens,
            "fed_tokens": self.fed_tokens,
            "generated_tokens": self.generated_tokens,
            "saved_s": round(self.saved_s, 3) if known else None,
        }


@dataclass(frozen=True, slots=True)
class Gain:
    """One request's figures, and seconds per token by range of positions as measured by then."""

    figures: SessionFigures
    paces: Mapping[int, float] = field(default_factory=dict)


_NAMES = tuple(one.name for one in fields(SessionFigures))
_ADD = (
    f"INSERT INTO session_figures (session, {', '.join(_NAMES)})"
    f" VALUES (:session, {', '.join(':' + name for name in _NAMES)})"
    f" ON CONFLICT (session) DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in _NAMES)
)


def add(db: sqlite3.Connection, session: str, namespace: str, gain: Gain) -> None:
    """Add one request's figures to its session's, and note how fast prompts were computed."""
    db.execute(_ADD, {"session": session, **asdict(gain.figures)})
    db.executemany(
        "INSERT INTO prefill_paces (namespace, range, token_s) VALUES (?, ?, ?)"
        " ON CONFLICT (namespace, range) DO UPDATE SET token_s = excluded.token_s",
        [(namespace, where, pace) for where, pace in gain.paces.items()],
    )


def get(db: sqlite3.Connection, session: str) -> SessionFigures:
    """A session's figures; zeros where there are none."""
    query = f"SELECT {', '.join(_NAMES)} FROM session_figures WHERE session = ?"
    row = db.execute(query, (session,)).fetchone()
    return SessionFigures(*row) if row is not None else SessionFigures()


def paces(db: sqlite3.Connection, namespace: str) -> dict[int, float]:
    """Seconds per token as measured last, by range of positions."""
    query = "SELECT range, token_s FROM prefill_paces WHERE namespace = ?"
    return dict(db.execute(query, (namespace,)).fetchall())
