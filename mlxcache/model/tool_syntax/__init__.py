"""The syntaxes in which model families write tool calls, and exact readers of these calls.

Each group of syntaxes has one module: `tags` (parameters between tags; `families` lists them),
`gemma`, `pythonic`, `json_calls`. Modules that they share: `readings` chooses between the readings
of one tool block, `schema` has the parameters of tools, `values` keeps JSON exact, and `syntax` is
the interface. This package works with text, not with tokens or the markers of tool blocks. It uses
nothing of mlx-lm but the names of its parsers.
"""
