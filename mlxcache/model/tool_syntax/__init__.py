"""The syntaxes in which model families write tool calls, and exact readers of these calls.

Each group of syntaxes has one module: `tags` (parameters between tags), `kimi_k3`, `gemma`,
`pythonic`, `json_calls`. `families` has the syntax of each model family. Modules that they share:
`syntax` is the interface, `scanning` follows a tool block while it arrives, `readings` chooses
between the readings of one tool block, `schema` has the parameters of tools, `literals` reads
values in the notation of Python or JSON, and `values` keeps JSON exact. This package works with
text, not with tokens or the markers of tool blocks. It uses nothing of mlx-lm but the names of its
parsers.
"""
