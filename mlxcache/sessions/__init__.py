"""Conversations that are remembered: the book, its writer, and sessions as files.

Stands below the engine: it is given callables for what needs a model or a scheduler, and knows
neither tasks nor HTTP. KV bytes are `mlxcache.cache`'s, files and rows `mlxcache.store`'s.
"""
