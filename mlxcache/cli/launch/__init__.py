"""`mlxcache launch`: start a coding agent on a server, and first the server if none is running.

`clients` describes each coding agent, `server` finds or starts the server, `process` runs the
client, and `chooser` is the menu. Nothing here changes the user's own settings of a client. Only
`launching` imports `mlxcache.model`, to describe a model that no server has loaded yet.
"""
