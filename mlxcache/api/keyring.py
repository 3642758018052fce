"""Which key a request carries, compared in a time that tells nothing of the keys."""

from __future__ import annotations

import hmac
from hashlib import sha256

from starlette.datastructures import Headers

from mlxcache.errors import Unauthorized
from mlxcache.owner import owner_of


class Keyring:
    """The keys that are let in. `common` is everybody's, `owned` are each an owner's."""

    def __init__(self, common: str | None, owned: tuple[str, ...] = ()):
        keys: list[tuple[str, str | None]] = [(key, owner_of(key)) for key in owned]
        if common is not None:
            keys.append((common, None))
        # Digests are of one length, so that not even a key's length shows.
        self._keys = [(sha256(key.encode()).digest(), owner) for key, owner in keys]

    def __bool__(self) -> bool:
        """Whether a key is asked for."""
        return bool(self._keys)

    def owner(self, headers: Headers) -> str | None:
        """The owner of the key that a request carries: as `Authorization: Bearer`, or `X-Api-Key`.

        All keys are compared with both, whichever fits. Raises Unauthorized where none does.
        """
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = [token.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        # Header values are bytes, read as latin-1.
        digests = [sha256(each.encode("latin-1")).digest() for each in given]
        fitting = [
            owner
            for digest in digests
            for key, owner in self._keys
            if hmac.compare_digest(digest, key)
        ]
        if not fitting:
            raise Unauthorized("The API key is missing or wrong.")
        return fitting[0]
