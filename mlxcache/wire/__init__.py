"""Bodies of the OpenAI and Anthropic APIs, converted to `Chat` and from engine events.

Field names of the APIs are used only here; the layers below use the types of `mlxcache.types`. The
package uses neither HTTP (statuses, headers, routes, streams) nor the engine, so that `embed` and
the command line can use it without a server.
"""
