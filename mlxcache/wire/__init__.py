"""Request and reply bodies of the OpenAI and Anthropic APIs, to and from `Chat` and engine events.

Field names of both APIs stop here: below it there are only the types of `mlxcache.types`. It must
not know HTTP (no status, header, route or stream) nor the engine, so that `embed` and the command
line can use it without a server.
"""
