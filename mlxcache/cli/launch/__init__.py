"""`mlxcache launch`: a server and a coding agent on it, in one line."""
