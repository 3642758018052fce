"""Models as mlx-lm runs them: load, identify, cache, sample, and parse their output.

This is the only package that imports mlx_lm. It works with arrays, tokens and files of weights. It
uses no prefix tree, budget, request, session or store.
"""
