"""Tables of files as an index had them before ranks and totals."""

from __future__ import annotations

SCHEMA = """
CREATE TABLE IF NOT EXISTS file (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  kind TEXT NOT NULL CHECK (kind IN ('run', 'checkpoint')),
  digest BLOB NOT NULL CHECK (typeof(digest) = 'blob' AND length(digest) = 16),
  base BLOB NOT NULL CHECK (typeof(base) = 'blob' AND length(base) = 16),
  key BLOB NOT NULL,
  start INTEGER NOT NULL CHECK (typeof(start) = 'integer' AND start >= 0),
  stop INTEGER NOT NULL CHECK (typeof(stop) = 'integer' AND stop >= start),
  nbytes INTEGER NOT NULL CHECK (typeof(nbytes) = 'integer' AND nbytes > 0),
  disk INTEGER NOT NULL CHECK (typeof(disk) = 'integer' AND disk >= 0),
  used REAL NOT NULL CHECK (typeof(used) = 'real'),
  parent INTEGER,
  previous INTEGER,
  owner TEXT,
  UNIQUE (kind, digest)
);
CREATE INDEX IF NOT EXISTS file_key ON file (key);
CREATE INDEX IF NOT EXISTS file_base ON file (base);
CREATE INDEX IF NOT EXISTS file_parent ON file (parent);
CREATE INDEX IF NOT EXISTS file_previous ON file (previous);
CREATE TABLE IF NOT EXISTS tokens (
  file INTEGER PRIMARY KEY REFERENCES file (id) ON DELETE CASCADE,
  ids BLOB NOT NULL CHECK (typeof(ids) = 'blob' AND length(ids) % 4 = 0)
);
CREATE TABLE IF NOT EXISTS pin (
  name TEXT NOT NULL,
  file INTEGER NOT NULL REFERENCES file (id) ON DELETE CASCADE,
  PRIMARY KEY (name, file)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS pin_file ON pin (file);
CREATE TABLE IF NOT EXISTS found (
  file INTEGER PRIMARY KEY REFERENCES file (id) ON DELETE CASCADE,
  count INTEGER NOT NULL
);
"""
