"""`mlxcache bench` and `mlxcache prove`: this server, and others beside it, as clients see them.

Servers run as child processes and are asked over HTTP. Only `inside`, and what imports it, knows
the engine, the cache and the store: it runs an engine in its own process, for figures that no
client can see (memory, the disk tier, log-probabilities).
"""
