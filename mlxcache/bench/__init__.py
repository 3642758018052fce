"""`mlxcache bench` and `mlxcache prove`: measure this server and others as clients see them.

Servers run as child processes and are measured over HTTP. The exception is `own_engine`, which runs
an engine in its own process for figures that no client can see: memory, the disk tier and
log-probabilities.
"""
