"""The disk tier: runs of KV and checkpoints in files, found by token ids, and the sessions.

`Store` is the one door to the files of a folder, `Writer` the thread that writes them. Also here:
the table of sessions, and snapshots of them. Only files and SQLite: it knows neither MLX, models
nor asyncio. The format is described in docs/disk-format.md.
"""
