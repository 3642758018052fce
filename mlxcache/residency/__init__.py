"""Residency: which models have their weights in memory, and how the memory of `--ram` is divided.

`residency.Rounds` runs the schedulers of all models in turn; `Residency` loads and unloads
their weights. MLX thread only. This package knows schedulers and budgets, but no request's text, no
session and no HTTP.
"""
