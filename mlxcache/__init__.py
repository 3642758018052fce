"""mlxcache: a session server that keeps every turn of a local coding agent warm."""

__version__ = "0.1.0"
