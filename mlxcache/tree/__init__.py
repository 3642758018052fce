"""Prefix tree, eviction order, thinning of checkpoints and the byte budget.

This package works on ints, token ids and opaque values only. It imports no MLX, opens no files and
starts no threads.
"""
