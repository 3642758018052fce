"""`mlxcache launch`: start a coding agent on a server, and the server first if none runs.

`clients` describes each coding agent, `server` finds or starts the server, `process` runs the
client, `chooser` is the menu. Nothing here changes files of a client's user, and only `launching`
imports the model layer, where it has to know a model that no server has loaded yet.
"""
