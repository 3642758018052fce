"""The engine: from requests to tokens, for one model or several.

Other layers use `engine.Engine` (one model) and `models.Models`, which run on the asyncio event
loop. Only `runtime` opens the store on disk and joins a model's scheduler to it. This package
handles no HTTP and no wire format. The steps of a request are in `mlxcache.scheduling`, the weights
and the memory of models in `mlxcache.residency`.
"""
