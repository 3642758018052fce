"""`python -m tests.patient ARGS` is `mlxcache ARGS` with a remote that is always worth asking.

A toy computes a prompt sooner than anything can be fetched.
"""

from __future__ import annotations

from mlxcache.cli.main import main
from mlxcache.remote import fetch, tier

if __name__ == "__main__":
    for name in ("COLD_SHARE", "UNKNOWN_SHARE", "WORTH"):
        setattr(fetch, name, 1000.0)
    tier.REPLIES_SHARE = 1000.0
    main()
