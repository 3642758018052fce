"""Tiny models with random weights, made in seconds, and the table of how each family caches.

They need what the package itself needs: no test extra.
"""
