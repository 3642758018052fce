"""Models as mlx-lm runs them: load, identify, cache, sample, and parse their output.

The only package that imports mlx_lm, and the only one that names its cache classes (`adapters`,
`quantise`, `rows`). It knows arrays, tokens and files of weights; it knows no prefix tree, budget,
request, session or store.
"""
