"""mlxcache: a model server for coding agents; every turn after the first starts warm."""

__version__ = "0.1.0"
