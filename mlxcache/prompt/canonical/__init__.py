"""Canonicalisation: remove machine-made text that changes between requests, before rendering.

Only system messages, replies, calls, tools and their results are changed, never a user's text,
and only text of exactly known shapes. Each rule is a module with a default in `config.rules`;
`canonicaliser` applies them in order, `restore` maps names back in the reply.
"""
