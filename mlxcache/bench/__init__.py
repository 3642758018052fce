"""`mlxcache bench`: measures this server, and others beside it, as a client sees them.

Servers run as child processes and are asked over HTTP. This package knows the command line and the
answers of the API; it knows no module of the engine, the cache or the store.
"""
