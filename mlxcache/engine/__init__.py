"""Requests to tokens: the asyncio facade, the loaded model, scheduler, prefill and decoding.

`engine.Engine` is what other layers use. Modules that say "MLX thread only" run on that one thread;
the rest runs on the event loop. Knows no HTTP and no wire format. KV bytes are reached through
`mlxcache.cache.KVCache` alone; only `runtime` opens the store that it is given.
"""
