"""Canonicalisation: known noise of machines, taken out of a conversation before it is rendered.

Each rule is a module of its own; `table` lists them, `canonicaliser` applies them. Only system
messages, replies, calls, tools and their results are touched, never the text of a user.
"""
