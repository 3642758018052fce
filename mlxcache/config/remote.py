"""URL of a shared remote: the value of `--remote`."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

SCHEMES = ("s3", "gs", "az", "file")


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """Parts of the URL of a remote.

    `bucket`: the bucket, or the container of Azure; empty for `file`. `prefix`: the beginning of
    the paths of all objects, without slashes at its ends; for `file` the absolute path of the
    folder.
    """

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        if self.scheme == "file":
            return f"file://{self.prefix}"
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def read_remote_url(value: object) -> RemoteUrl:
    """Parse the URL of a remote. A RemoteUrl is returned unchanged.

    Raises ValueError for anything else, and for a URL with a user, a key or options: error messages
    and figures show the URL, so it must hold no secret.
    """
    example = "must be a URL such as s3://bucket/prefix, gs://..., az://... or file:///path"
    if isinstance(value, RemoteUrl):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{example}, not {value!r}")
    parts = urlsplit(value.strip())
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            f"{example}, without keys or options: set those in the environment, such as "
            "AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL"
        )
    if parts.scheme not in SCHEMES:
        raise ValueError(f"{example}, not {value!r}")
    path = unquote(parts.path).strip("/")
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not path:
            raise ValueError(f"{example} with three slashes and an absolute path, not {value!r}")
        return RemoteUrl("file", "", f"/{path}")
    if not parts.netloc:
        raise ValueError(f"{example}: {value!r} names no bucket")
    return RemoteUrl(parts.scheme, parts.netloc, path)
