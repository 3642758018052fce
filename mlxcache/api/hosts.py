"""Keeping web pages out: by the names in a request's Host and Origin headers.

A page that a person visits can make their browser send requests to 127.0.0.1, and, by pointing
its own name there (DNS rebinding), also read the answers. Such requests carry the page's name.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers

LOCAL_SUFFIXES = (".localhost", ".local", ".internal", ".lan", ".home.arpa")
"""Names below these are never a stranger's: they are not in the public DNS."""


def stranger(headers: Headers) -> str | None:
    """The name of a web site that sent the request, or None if none did.

    An origin that is no site's, such as an editor's `vscode-webview://...`, is no stranger; a
    page that hides its own (`null`) is.
    """
    host = headers.get("host", "")
    if not is_local(_name(f"//{host}")):
        return host
    origin = headers.get("origin", "")
    web = origin == "null" or origin.lower().startswith(("http://", "https://"))
    return origin if web and not is_local(_name(origin)) else None


def is_local(name: str | None) -> bool:
    """Whether a name can be this machine's or its own network's: an address, or no public name."""
    if name is None:
        return False
    name = name.rstrip(".").lower()
    if "." not in name or name.endswith(LOCAL_SUFFIXES) or name == socket.gethostname().lower():
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _name(url: str) -> str | None:
    if url == "null":
        return None
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return None
