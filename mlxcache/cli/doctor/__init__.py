"""`mlxcache doctor`: checks of the machine, the settings and a model, each with a remedy.

Needs no server, and starts none; writes nothing but a test file in the cache folder.
"""
