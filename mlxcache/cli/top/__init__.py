"""`mlxcache top`: budgets, requests and sessions of a running server, live in the terminal.

`state` collects the server's updates, `view` renders them, `command` reads and prints. Knows the
server only by HTTP.
"""
