"""A model divided among several processes (ranks): one decides, the others repeat what it does.

Rank 0 runs the engine, the prefix tree and HTTP as if it were alone. The other ranks have none of
these: they hold lineages, checkpoints and batches under numbers that rank 0 chooses, and repeat
each operation on them in the same order. Every rank keeps its part of the KV in a store of its own.
"""
