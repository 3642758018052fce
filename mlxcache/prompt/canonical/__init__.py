"""Canonicalisation: removing machine-made text that changes between requests, before rendering.

Only system messages, replies, calls, tools, tool results and clients' reminders are changed, never
a user's own text, and only text of exactly known patterns. Each rule is a module, with a default in
`config.rules`.
`canonicaliser` applies the rules in order, and `restore` converts names in the reply back.
"""
