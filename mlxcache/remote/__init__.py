"""The shared remote: objects in storage that several servers use, and what they exchange there.

`Objects` reads and writes whole objects by name, plain or sealed; `RemoteTier` exchanges the KV,
replies and session records of one model through `Objects`. This package calls no MLX. Nothing here
is imported unless `--remote` is set.
"""
