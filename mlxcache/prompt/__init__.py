"""From a conversation to token ids: canonicalise, render, replay replies, tokenise incrementally.

`builder.PromptBuilder` does all of that for one model. `explain` and `audit` find out why a prompt
differs from an earlier one, and what is likely to change in the next.

Pure Python: nothing here knows MLX, the HTTP APIs, sessions or caches. Nothing waits for a disk or
a database while it renders: known replies are given to it.
"""
