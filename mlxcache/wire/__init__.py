"""Request and response bodies of the OpenAI and Anthropic APIs.

Requests are converted to `Chat` and other types of `mlxcache.types`, replies from the events of the
engine. Field names of the APIs are used only here. The package uses neither HTTP (statuses,
headers, routes, streams) nor the engine, so that `embed` and the command line can use it without a
server.
"""
