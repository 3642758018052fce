"""Sessions of a running server: list, change, record turns, import and export, show as a tree.

This package is below the engine: callables that need a model or the scheduler are passed to it. It
owns no storage: cached KV is in `mlxcache.cache`, files and rows in `mlxcache.store`.
"""
