"""KV bytes and their one owner: `KVCache`, with a tier in RAM and a tier on disk.

Everything that reads or changes KV goes through its methods: match, acquire, restore, extend,
commit, persist, finish, release, abandon, purge, forget, clear. This package works with token ids,
leases and hints; it uses no tasks, streams or HTTP. All of it runs on the one thread that calls
MLX, unless a docstring says otherwise.
"""
