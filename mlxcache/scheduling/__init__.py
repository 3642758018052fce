"""Scheduling: which request computes next, and how: admission, prefill, decoding, anticipation.

Each model has one `scheduler.Scheduler`. Modules documented as "MLX thread only" run on the one
thread that calls MLX; all others run on the event loop. This package handles no HTTP, no wire
format and no session, and knows nothing of other models. It reaches cached KV only through
`mlxcache.cache.kv_cache.KVCache`.
"""
