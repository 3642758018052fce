"""Canonicalisation: removing machine-made text that changes between requests, before rendering.

Never the user's own text, and only text of exactly known patterns. A rule has a default in
`config.rules`, and `canonicaliser` applies the rules in order.
"""
