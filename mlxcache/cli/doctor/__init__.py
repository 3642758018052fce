"""`mlxcache doctor`: checks of the machine, the settings and a model, each with a remedy.

The checks neither need nor start a server. They write only a test file in the cache folder and,
with --remote, a test object, and remove them afterwards.
"""
