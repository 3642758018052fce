"""Sessions of a running server: lists and changes, recorded turns, files, and the tree view.

This package is below the engine: callables that need a model or the scheduler are passed to it, and
it depends on neither tasks nor HTTP. Cached KV belongs to `mlxcache.cache`, files and database rows
to `mlxcache.store`.
"""
