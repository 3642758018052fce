"""Sessions of a running server: list, change, record turns, import and export, show as a tree.

This package is below the engine: callables that need a model or the scheduler are passed to it, and
it depends neither on the scheduler's tasks nor on HTTP. It owns no storage: cached KV is in
`mlxcache.cache`, the files and database rows of the disk tier in `mlxcache.store`.
"""
