"""Totals of the index's files, which triggers update within every transaction.

Triggers are part of the index, so that a server of an earlier version updates the totals too.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

SCHEMA = """
CREATE TABLE IF NOT EXISTS totals (
  kind TEXT PRIMARY KEY,
  files INTEGER NOT NULL,
  durable INTEGER NOT NULL,
  disk INTEGER NOT NULL,
  durable_disk INTEGER NOT NULL,
  pinned_disk INTEGER NOT NULL,
  tokens INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS totals_insert AFTER INSERT ON file BEGIN
  UPDATE totals SET files = files + 1, durable = durable + (NEW.owner IS NULL),
    disk = disk + NEW.disk, durable_disk = durable_disk + NEW.disk * (NEW.owner IS NULL),
    tokens = tokens + NEW.stop - NEW.start
  WHERE kind = NEW.kind;
END;
CREATE TRIGGER IF NOT EXISTS totals_delete BEFORE DELETE ON file BEGIN
  UPDATE totals SET files = files - 1, durable = durable - (OLD.owner IS NULL),
    disk = disk - OLD.disk, durable_disk = durable_disk - OLD.disk * (OLD.owner IS NULL),
    pinned_disk = pinned_disk - OLD.disk * EXISTS (SELECT 1 FROM pin WHERE file = OLD.id),
    tokens = tokens - OLD.stop + OLD.start
  WHERE kind = OLD.kind;
END;
CREATE TRIGGER IF NOT EXISTS totals_update AFTER UPDATE OF disk, owner, start, stop ON file BEGIN
  UPDATE totals SET durable = durable - (OLD.owner IS NULL) + (NEW.owner IS NULL),
    disk = disk - OLD.disk + NEW.disk,
    durable_disk = durable_disk - OLD.disk * (OLD.owner IS NULL)
      + NEW.disk * (NEW.owner IS NULL),
    pinned_disk = pinned_disk
      + (NEW.disk - OLD.disk) * EXISTS (SELECT 1 FROM pin WHERE file = NEW.id),
    tokens = tokens - OLD.stop + OLD.start + NEW.stop - NEW.start
  WHERE kind = NEW.kind;
END;
CREATE TRIGGER IF NOT EXISTS totals_pin AFTER INSERT ON pin
WHEN (SELECT count(*) FROM pin WHERE file = NEW.file) = 1 BEGIN
  UPDATE totals SET pinned_disk = pinned_disk + (SELECT disk FROM file WHERE id = NEW.file)
  WHERE kind = (SELECT kind FROM file WHERE id = NEW.file);
END;
CREATE TRIGGER IF NOT EXISTS totals_unpin AFTER DELETE ON pin
WHEN NOT EXISTS (SELECT 1 FROM pin WHERE file = OLD.file) BEGIN
  UPDATE totals SET pinned_disk = pinned_disk - (SELECT disk FROM file WHERE id = OLD.file)
  WHERE kind = (SELECT kind FROM file WHERE id = OLD.file);
END;
"""
"""Table with one row for each kind of file, and its triggers.

The pins of a deleted file are deleted after it, so `totals_unpin` then changes nothing.
"""

_COUNT = """
INSERT OR REPLACE INTO totals
SELECT kinds.kind, count(id), count(id) FILTER (WHERE owner IS NULL), ifnull(sum(disk), 0),
  ifnull(sum(disk) FILTER (WHERE owner IS NULL), 0),
  ifnull(sum(disk) FILTER (WHERE id IN (SELECT file FROM pin)), 0), ifnull(sum(stop - start), 0)
FROM (SELECT 'run' AS kind UNION ALL SELECT 'checkpoint') AS kinds
LEFT JOIN file ON file.kind = kinds.kind GROUP BY kinds.kind
"""


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of the files of one kind.

    `files`: how many, of which `durable` are durable and the rest is being written. `disk`: bytes
    on disk, of which `durable_disk` are those of durable files, and `pinned_disk` those of pinned
    ones. `tokens`: tokens of runs; 0 for checkpoints.
    """

    files: int = 0
    durable: int = 0
    disk: int = 0
    durable_disk: int = 0
    pinned_disk: int = 0
    tokens: int = 0

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.files + other.files,
            self.durable + other.durable,
            self.disk + other.disk,
            self.durable_disk + other.durable_disk,
            self.pinned_disk + other.pinned_disk,
            self.tokens + other.tokens,
        )


def count_files(connection: sqlite3.Connection) -> None:
    """Set the totals by reading the rows of all files, for an index that has no totals yet."""
    connection.execute(_COUNT)


def are_counted(connection: sqlite3.Connection) -> bool:
    """Return whether the index has totals; one of an earlier version has none."""
    return connection.execute("SELECT 1 FROM totals").fetchone() is not None


def read_totals(connection: sqlite3.Connection) -> dict[str, Totals]:
    """Return the totals by kind of file: of "run" and of "checkpoint"."""
    query = "SELECT kind, files, durable, disk, durable_disk, pinned_disk, tokens FROM totals"
    return {kind: Totals(*sums) for kind, *sums in connection.execute(query)}


def read_total(connection: sqlite3.Connection) -> Totals:
    """Return the totals of all files."""
    return sum(read_totals(connection).values(), start=Totals())
