"""`mlxcache prove`: measure mlxcache and mlx-lm on this machine, and write one report.

Each scenario starts the processes that it needs and writes its figures into `Findings`, so that
figures taken before a failure are kept. The report contains nothing that identifies the machine or
its user.
"""
