"""`mlxcache prove`: one report on mlxcache, and on mlx-lm beside it, on this machine.

Each scenario starts the processes that it needs and writes its figures into `Findings`, so that
those taken before a failure are kept. The report contains nothing that identifies the machine or
its user.
"""
