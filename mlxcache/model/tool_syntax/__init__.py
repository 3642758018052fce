"""The syntaxes in which model families write tool calls, and their reading without loss.

One module a group of syntaxes: `tags` (parameters between tags; `families` lists them), `gemma`,
`pythonic`, `json_calls`. What they share: `readings` chooses between the readings of one block,
`schema` knows a tool's parameters, `values` keeps JSON exact, `syntax` is the interface. Knows no
tokens and no markers of blocks; it reads text. Nothing of mlx-lm is used but the names of its
parsers.
"""
