"""Guides: which tokens a reply may continue with, and the grammars that they follow.

From a request's format, tools and thinking budget to an llguidance grammar, and from that to the
guide of one reply. Must not know: MLX, the engine, HTTP. `decoder` applies what a guide allows.
"""
