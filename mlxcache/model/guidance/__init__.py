"""Guides, which decide the tokens that a reply may continue with, and the grammars they follow.

A request's format and tools become an llguidance grammar, and the grammar becomes the guide of one
reply. The guide that ends thinking when its budget is spent needs no grammar. `scheduling.decoder`
applies the tokens that a guide allows. This package uses no MLX, no engine and no HTTP.
"""
