"""The engine: from requests to tokens, with scheduling, prefill and decoding.

Other layers use `engine.Engine`, which runs on the asyncio event loop. Modules documented as "MLX
thread only" run on the one thread that calls MLX; all others run on the event loop. This package
handles no HTTP and no wire format. It reaches cached KV only through `mlxcache.cache.KVCache`; only
`runtime` opens the store on disk.
"""
