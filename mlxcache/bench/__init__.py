"""Measures this server, and others beside it, as a client sees them."""
