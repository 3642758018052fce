"""The prefix tree, eviction order, thinning of checkpoints and the byte budget.

Pure: ints, token ids and opaque values. No MLX, no files, no threads.
"""
