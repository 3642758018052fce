"""The syntaxes in which model families write tool calls: their readers and their grammars.

`families` has one row for each family. A module has a group of syntaxes, for reading and for
writing grammars: `tags` (parameters between tags), `gemma`, `json_calls`. What they share:
`reading` (of tool blocks), `arguments` (values and their types) and `writing` (of grammars). This
package works with text, not with tokens or the markers of tool blocks. It uses nothing of mlx-lm
but the names of its parsers.
"""
