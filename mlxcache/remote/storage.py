"""Client of object storage: one call for each operation. The only importer of obstore.

Credentials come from the environment, under the names that each provider's own tools use, and for
S3 also from ~/.aws.
"""

from __future__ import annotations

import atexit
import configparser
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import obstore
import xxhash
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

from mlxcache.config.remote import RemoteUrl
from mlxcache.errors import ConfigError, Corrupt

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

CONNECT_S = 1.5
"""Seconds to connect, including the handshake of TLS."""

EXIT_S = 0.2
"""Seconds that a process waits before it ends: obstore's threads may still need the interpreter."""

# a thread that waits for the interpreter when it shuts down aborts the process
atexit.register(time.sleep, EXIT_S)

_PART_BYTES = 1 << 18
_PAGE = 1000
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


_STATUS = re.compile(r"status code: (\d+)(?: ([A-Za-z ]+))?")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_SLOW_DOWN = (408, 425, 429)

_CAUSES = {
    "connection refused": "connection refused",
    "dns error": "its host name is unknown",
    "connection reset": "connection reset",
    "connection closed": "connection closed",
    "certificate": "its certificate is not valid",
    "permission denied": "permission denied",
    "read-only file system": "it is read-only",
    "no space left": "the share is full",
    "quota exceeded": "the share is full",
    "timed out": "it does not answer",
    "invalid http": "its answers are not HTTP",
}
"""Reasons by a part of obstore's text, in lower case."""

_LOCAL = ("permission denied", "it is read-only", "the share is full")
"""Reasons of `_CAUSES` that end writing only: reading may still work."""


class Failure(Exception):
    """Error of one operation on the remote; its text is a short reason without secrets.

    `grave`: the next operations of this kind (reading or writing) would fail too. `gone`: those of
    both kinds would.
    """

    def __init__(self, reason: str, *, grave: bool, gone: bool = False):
        super().__init__(reason)
        self.grave = grave
        self.gone = gone


class WrongKey(Failure):
    """Failure: the remote's marker is of another key (or of none), or of another format."""

    def __init__(self, reason: str):
        super().__init__(reason, grave=True, gone=True)


def describe_failure(error: Exception) -> Failure:
    """Return the failure that stands for an error of obstore.

    The error's own text is not passed on: it holds URLs, which may be signed. After a failure that
    is `grave` the remote is skipped at once; after others, such as status 503, only if three come
    in a row, because they may be the provider's way to slow a client down. Grave are: the statuses
    4xx except 408, 425 and 429, and every error without a status. One that shows that the remote
    cannot be reached, such as a refused connection, is `gone` as well.
    """
    text = str(error)
    if status := _STATUS.search(text):
        code = _CODE.search(text)
        words = [status[1], (status[2] or "").strip(), f"({code[1]})" if code else ""]
        number = int(status[1])
        reason = "it answered " + " ".join(filter(None, words))
        return Failure(reason, grave=400 <= number < 500 and number not in _SLOW_DOWN)
    lower = text.lower()
    for sign, reason in _CAUSES.items():
        if sign in lower:
            return Failure(reason, grave=True, gone=reason not in _LOCAL)
    return Failure(f"{type(error).__name__} of the storage", grave=True)


def too_slow() -> Failure:
    """Return the failure of an operation that exceeded its deadline."""
    return Failure("it is too slow, or does not answer", grave=True)


MAGIC = b"mlxcache"
VERSION = 1
HEAD_BYTES = 16
"""Bytes before the content: magic (8), version (1), form (1), zeros (6)."""

PLAIN, SEALED = 0, 1


class Plain:
    """Form of objects without a key: names as they are, contents with a checksum. Thread-safe.

    `overhead`: bytes by which a stored object is longer than its content. `key_id`: a public digest
    of the key; None without one. `plain_name` returns None for a name of another form or key;
    `unwrap` raises Corrupt for what `wrap` did not make under this name.
    """

    overhead = HEAD_BYTES + 16
    key_id: str | None = None

    def stored_name(self, name: str) -> str:
        return name

    def plain_name(self, stored: str) -> str | None:
        return stored

    def wrap(self, name: str, content: bytes | memoryview) -> bytes:
        return b"".join((make_head(PLAIN), _checksum(name, content), content))

    def unwrap(self, name: str, stored: bytes | bytearray) -> bytes:
        check_head(stored, PLAIN)
        content = memoryview(stored)[self.overhead :]
        if stored[HEAD_BYTES : self.overhead] != _checksum(name, content):
            raise Corrupt("its checksum is wrong")
        return bytes(content)


def make_head(form: int) -> bytes:
    return MAGIC + bytes((VERSION, form)) + bytes(6)


def check_head(stored: bytes | bytearray, form: int) -> None:
    if stored[: len(MAGIC)] != MAGIC:
        raise Corrupt("it is not an object of mlxcache")
    if stored[:HEAD_BYTES] != make_head(form):
        raise Corrupt("it has another version, or is sealed and this server has no key")


def _checksum(name: str, content: bytes | memoryview) -> bytes:
    digest = xxhash.xxh3_128(name.encode() + b"\0")
    digest.update(content)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Stored:
    path: str
    size: int
    modified: datetime


class Storage:
    """Client of the storage at `url`. Methods raise Failure, and no other error.

    Failed operations are not repeated, and only connecting has a time limit: callers cancel an
    operation that takes too long, which closes its connection. Raises ConfigError if `url` cannot
    be used, also for a missing folder: a share that is not mounted would become a local folder.
    """

    def __init__(self, url: RemoteUrl):
        self.url = url
        try:
            self._store = _connect(url)
        except (exceptions.BaseError, ValueError) as error:
            raise ConfigError(f"--remote {url}: {_first_line(error)}") from error

    @property
    def is_folder(self) -> bool:
        return self.url.scheme == "file"

    def is_within(self, path: str) -> bool:
        """Return False for an object in a folder that is reached over a symbolic link.

        Listings of a folder follow links, which may lead out of the remote. `path`: that of the
        object. Always True for other storage than a folder. Blocks.
        """
        if not self.is_folder:
            return True
        root, folder = os.path.realpath(self.url.prefix), os.path.dirname(path)
        return os.path.realpath(os.path.join(root, folder)) == os.path.join(root, folder)

    async def head(self, path: str) -> int | None:
        try:
            with _failures():
                return int((await obstore.head_async(self._store, path))["size"])
        except FileNotFoundError:
            return None

    async def open(self, path: str) -> tuple[int, AsyncIterator[memoryview]] | None:
        try:
            with _failures():
                result = await obstore.get_async(self._store, path)
        except FileNotFoundError:
            return None
        return int(result.meta["size"]), _parts(result)

    async def put(self, path: str, data: bytes) -> None:
        """Write an object in one request: it appears whole or not at all."""
        try:
            with _failures():
                await obstore.put_async(self._store, path, data, use_multipart=False)
        except FileNotFoundError:
            raise Failure("there is no such bucket or folder", grave=True) from None

    async def pages(self, prefix: str) -> AsyncIterator[list[Stored]]:
        with _failures():
            async for page in obstore.list(self._store, prefix, chunk_size=_PAGE):
                yield [Stored(one["path"], one["size"], one["last_modified"]) for one in page]

    async def delete(self, *paths: str) -> None:
        """Remove the objects `paths`, in one request if possible. An absent one is no error."""
        with suppress(FileNotFoundError), _failures():
            await obstore.delete_async(self._store, list(paths))


async def _parts(result: obstore.GetResult) -> AsyncIterator[memoryview]:
    with _failures():
        async for part in result.stream(min_chunk_size=_PART_BYTES):
            yield memoryview(part)


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except (Failure, FileNotFoundError):
        raise
    except (exceptions.BaseError, OSError, RuntimeError, ValueError) as error:
        raise describe_failure(error) from error


def _connect(url: RemoteUrl) -> ObjectStore:
    if url.scheme == "file":
        if not Path(url.prefix).is_dir():
            raise ConfigError(
                f"--remote: there is no folder {url.prefix}: mount the share, or create it"
            )
        return LocalStore(url.prefix)
    options: ClientConfig = {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "timeout": timedelta(hours=1),
    }
    retries: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
    prefix = url.prefix or None
    if url.scheme == "s3":
        config = _s3_config()
        if config.get("endpoint", "").startswith("http://"):
            options["allow_http"] = True
        return S3Store(
            url.bucket, prefix=prefix, config=config, client_options=options, retry_config=retries
        )
    made = GCSStore if url.scheme == "gs" else AzureStore
    return made(url.bucket, prefix=prefix, client_options=options, retry_config=retries)


def _s3_config() -> S3Config:
    """Return the options of S3 that obstore does not read from the environment itself.

    They are the endpoint, since plain HTTP must be allowed explicitly, and what ~/.aws has (profile
    AWS_PROFILE) where the environment has none.
    """
    found: S3Config = {}
    profile = os.environ.get("AWS_PROFILE") or "default"
    if endpoint := next(filter(None, map(os.environ.get, _ENDPOINTS)), None):
        found["endpoint"] = endpoint
    if not os.environ.get("AWS_ACCESS_KEY_ID"):
        keys = _section("AWS_SHARED_CREDENTIALS_FILE", "credentials", profile)
        if "aws_access_key_id" in keys and "aws_secret_access_key" in keys:
            found["access_key_id"] = keys["aws_access_key_id"]
            found["secret_access_key"] = keys["aws_secret_access_key"]
            if token := keys.get("aws_session_token"):
                found["session_token"] = token
    if not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        section = "default" if profile == "default" else f"profile {profile}"
        if region := _section("AWS_CONFIG_FILE", "config", section).get("region"):
            found["region"] = region
    return found


def _section(variable: str, name: str, section: str) -> dict[str, str]:
    path = Path(os.environ.get(variable) or Path.home() / ".aws" / name)
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"--remote: {path} is not a file of AWS settings: mend it") from error
    return dict(parser[section]) if parser.has_section(section) else {}


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
