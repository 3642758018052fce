"""KV bytes of a model and `KVCache`, their one owner, with a tier in RAM and one on disk.

Everything that reads or changes KV calls its methods, from `match` and `acquire` for a new request
to `commit` and `release`. This package works with token ids, leases and hints; it uses no tasks,
streams or HTTP. All of it runs on the MLX thread, unless a docstring names another one.
"""
