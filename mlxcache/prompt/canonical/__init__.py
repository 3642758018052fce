"""Canonicalisation: removing machine-made text that changes between requests, before rendering.

System messages, replies, calls, tools and tool results are changed, and reminders that a client
writes before a user's text; never the user's own text, and only text of exactly known patterns.
Each rule is a module, with a default in `config.rules`. `canonicaliser` applies the rules in order,
and `restore` converts names in the reply back.
"""
