"""From a conversation to token ids: canonicalise, render, replay replies, tokenise incrementally.

`builder.PromptBuilder` does all of this for one model. Rendering never waits for a disk or
database: known replies are passed in. This package depends neither on MLX, nor on sessions or
caches.
"""
