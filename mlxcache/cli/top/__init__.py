"""`mlxcache top`: budgets, requests and sessions of a running server, live in the terminal.

`state` receives the server's updates and keeps the latest, `view` renders them as text, and
`command` is the command: it prints that text once, or redraws it. The server is accessed over HTTP
only.
"""
