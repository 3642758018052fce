"""`mlxcache top`: budgets, requests and sessions of a running server, live in the terminal.

`state` collects the server's updates, `view` renders them, `command` reads and prints. The server
is accessed over HTTP only.
"""
