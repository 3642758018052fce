"""From a conversation to token ids: canonicalise, render, replay replies, tokenise incrementally.

`builder.PromptBuilder` does all of this for one model. `explain` finds why a prompt differs from an
earlier one, and `audit` what is likely to change in the next one.

This package is pure Python and depends on neither MLX, the HTTP APIs, sessions nor caches.
Rendering never waits for a disk or database: known replies are passed in.
"""
