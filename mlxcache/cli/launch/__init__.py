"""`mlxcache launch`: start a coding agent on a server, and first the server if none is running.

`clients` describes each coding agent, `processes` runs the server and the client. Nothing here
changes the user's own settings of a client.
"""
