"""HTTP API: routes, streams, access checks, metrics and the dashboard, over `engine` and `wire`.

The only package that imports Starlette and sse-starlette. Handlers check a request, call the engine
and encode its answer. They keep no state of a conversation and never call MLX.
"""
