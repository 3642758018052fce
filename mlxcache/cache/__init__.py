"""KV bytes and their one owner: `KVCache`, over a RAM tier and a disk tier.

Every decision about KV bytes passes through its verbs: match, acquire, restore, extend, commit,
persist, finish, release, abandon, purge, forget, clear. Knows token ids, leases and hints, but no
task, no stream and no HTTP. Everything here runs on the MLX thread unless it says otherwise.
"""
