"""`mlxcache prove`: one report on what this machine makes of mlxcache, and of mlx-lm beside it.

Each scenario starts the processes that it needs and writes its figures into `Findings`, so that
those taken before a failure are kept. Nothing of the report tells whose machine it is.
"""
