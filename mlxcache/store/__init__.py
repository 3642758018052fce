"""The disk tier: KV and checkpoints in files, found by token ids, and the table of sessions.

All access to the files of a store folder goes through `Store`; a `Writer` thread writes them. This
package also exports and imports snapshots of sessions. It uses only files and SQLite, and depends
on neither MLX nor asyncio. The file format is described in docs/disk-format.md.
"""
