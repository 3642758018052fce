"""Objects of the shared remote: reads and writes with deadlines and one type of error."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from mlxcache.config import Settings
from mlxcache.config.keys import read_remote_key
from mlxcache.config.remote import RemoteUrl, read_remote_url
from mlxcache.errors import ConfigError, Corrupt, RemoteUnavailable
from mlxcache.remote.condition import FAILURES, Breaker, Traffic
from mlxcache.remote.storage import Failure, Plain, Storage, WrongKey, too_slow

log = logging.getLogger("mlxcache.remote")

MARKER = "v1/mlxcache.json"
"""Name of the marker, which tells with which key the other objects are sealed.

Neither its name nor its content is sealed.
"""

TRIAL = "v1/trial"
"""Name of an object that tests whether the remote can be written."""

LARGEST_BYTES = 1 << 30

MARKER_BYTES = 1 << 16

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")

T = TypeVar("T")
Names = list[str]
Work = Callable[[], Coroutine[Any, Any, T]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Time limits of operations, and how many run at once.

    An operation may take `operation_s` seconds, and in addition the time for its bytes at
    `least_down` (reading) or `least_up` (writing) bytes per second. `start_s`: that of the check at
    the start. `probe_s`: pause before the first probe. At most `small` operations that move no
    content, and `large` that do, run at once.
    """

    operation_s: float = 2.0
    least_down: float = 2e6
    least_up: float = 0.25e6
    start_s: float = 3.0
    probe_s: float = 1.0
    small: int = 32
    large: int = 8


LIMITS = Limits()


class Objects:
    """Reader and writer of the objects of one remote.

    It has a thread, which `close` ends. Methods may be called on any thread, block up to their
    deadline (`Limits`) and raise RemoteUnavailable, or ValueError for a name that is not made of
    parts such as `run` or `0f3a` with slashes between them. `within`: seconds to wait at most, if
    less than the deadline. When that ends the wait, the operation goes on, and counts for the
    breakers by its own deadline. Objects of more than `most` bytes count as damaged, and are not
    read. `marks`: write the marker if it is absent, which decides the key of a new remote.

    Reading and writing have a breaker each. After failures of writing, methods that write raise at
    once, until a probe in the background succeeds; after failures of reading, those that read and
    those that write do.
    """

    def __init__(
        self, storage: Storage, form: Plain, limits: Limits = LIMITS, *, marks: bool = True
    ):
        self._storage, self._form, self._limits = storage, form, limits
        self._marks = marks
        self._reading, self._writing = Breaker(limits.probe_s), Breaker(limits.probe_s)
        self._probing: asyncio.Task[None] | None = None
        self._announced, self._since = "ok", time.time()
        self._up, self._down = Traffic(), Traffic()
        self._damaged = self._damaged_in_a_row = 0
        self._counting = threading.Lock()
        self._small, self._large = asyncio.Semaphore(limits.small), asyncio.Semaphore(limits.large)
        self._closed = False
        self._submitting = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="mlxcache-remote", daemon=True)
        self._thread.start()

    @property
    def url(self) -> RemoteUrl:
        return self._storage.url

    # -- operations --------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """True if reads are tried. While it is False, they raise RemoteUnavailable at once."""
        return not (self._reading.is_open or self._closed)

    @property
    def writable(self) -> bool:
        return not (self._writing.is_open or self._reading.is_open or self._closed)

    def head(self, name: str, within: float | None = None) -> int | None:
        """Return the bytes of an object's content, or None if it is absent."""
        return self.head_many([name], within)[0]

    def head_many(self, names: Sequence[str], within: float | None = None) -> list[int | None]:
        stored = [self._stored(name) for name in names]
        return self._wait(lambda: _all([self._head(one) for one in stored]), self._reading, within)

    def get(
        self, name: str, within: float | None = None, *, most: int = LARGEST_BYTES
    ) -> bytes | None:
        """Return the content of an object, or None if it is absent or damaged."""
        return self.get_many([name], within, most=most)[0]

    def get_many(
        self, names: Sequence[str], within: float | None = None, *, most: int = LARGEST_BYTES
    ) -> list[bytes | None]:
        """Return the content of each of the objects `names`, read at the same time.

        None stands for an object that is absent, damaged or could not be read; if the last is so
        for all of them, raises RemoteUnavailable.
        """
        stored = [self._stored(name) for name in names]
        found = self._wait(
            lambda: _most([self._get(one, most) for one in stored]), self._reading, within
        )
        return [
            None if one is None else self._unwrap(name, one)
            for name, one in zip(names, found, strict=True)
        ]

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Write an object, or replace it. Other servers see the content whole or not at all."""
        stored = self._stored(name)
        if not self.writable:
            raise self._unavailable()
        wrapped = self._form.wrap(name, data)
        self._wait(partial(self._put, stored, wrapped), self._writing, None)

    def list(self, prefix: str, limit: int, within: float | None = None) -> Names:
        """Return the names of at most `limit` objects below `prefix`, sorted.

        Which ones is undefined if there are more. Names under another key are left out. `prefix`: a
        name's first parts, with or without a slash at its end.
        """
        stored = self._stored(prefix.rstrip("/"))
        found = self._wait(partial(self._list, stored, limit), self._reading, within)
        names = (self._form.plain_name(one) for one in found)
        return sorted(name for name in names if name is not None)

    def delete(self, name: str) -> None:
        self._wait(partial(self._delete, self._stored(name)), self._writing, None)

    def figures(self) -> dict[str, Any]:
        """Return the field `remote` of `GET /v1/cache`, without `exchange`."""
        state, reason = self._state()
        return {
            "url": str(self.url),
            "sealed": self._form.key_id is not None,
            "state": state,
            "reason": reason,
            "since": round(self._since, 3),
            "errors": self._reading.errors + self._writing.errors,
            "damaged_objects": self._damaged,
            "uploaded_objects": self._up.objects,
            "uploaded_bytes": self._up.bytes,
            "downloaded_objects": self._down.objects,
            "downloaded_bytes": self._down.bytes,
            "upload_bytes_per_s": self._up.rate,
            "download_bytes_per_s": self._down.rate,
        }

    def count_damaged(self) -> None:
        """Count an object that was read whole, but has wrong content."""
        with self._counting:
            self._damaged += 1

    def check(self) -> None:
        """Compare the marker in the remote with this server's key, and write it if it is absent.

        Blocks for at most `Limits.start_s` seconds. A remote that cannot be reached is only logged.
        Raises ConfigError if it holds objects of another key, or of none.
        """
        try:
            check = partial(self._check_marker, probe=False)
            self._wait(check, self._reading, self._limits.start_s)
        except RemoteUnavailable as error:
            if isinstance(error.__cause__, WrongKey):
                raise ConfigError(f"--remote {self.url}: {error.__cause__}") from error

    def close(self) -> None:
        """End the thread. Operations in progress are cancelled, and raise RemoteUnavailable."""
        with self._submitting:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # -- on the callers' threads -------------------------------------------------------------

    def _stored(self, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"not the name of an object: {name!r}")
        return self._form.stored_name(name)

    def _wait(self, work: Work[T], breaker: Breaker, within: float | None) -> T:
        """Run `work()` on the remote's thread; wait for its result, at most `within` seconds."""
        with self._submitting:
            if breaker.is_open or self._reading.is_open or self._closed:
                raise self._unavailable()
            future: Future[T] = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result(within)
        except Failure as error:
            raise RemoteUnavailable(f"the remote {self.url} failed: {error}") from error
        except TimeoutError:
            raise RemoteUnavailable(f"the remote {self.url} took over {within:g} s") from None
        except FutureCancelled:
            raise RemoteUnavailable(f"the remote {self.url} was closed") from None

    def _unavailable(self) -> RemoteUnavailable:
        reason = "it is closed" if self._closed else self._state()[1]
        return RemoteUnavailable(f"the remote {self.url} is skipped: {reason}")

    def _unwrap(self, name: str, stored: bytearray | Corrupt) -> bytes | None:
        try:
            if isinstance(stored, Corrupt):
                raise stored
            content = self._form.unwrap(name, stored)
        except Corrupt as error:
            log.warning("remote object is damaged, and not used: %s: %s", name, error)
            with self._counting:
                self._damaged += 1
                self._damaged_in_a_row += 1
                many = self._damaged_in_a_row >= FAILURES
            if many:
                failure = Failure(f"its objects are damaged: {error}", grave=True)
                with self._submitting:
                    if not self._closed:
                        self._loop.call_soon_threadsafe(self._record, self._reading, failure)
            return None
        with self._counting:
            self._damaged_in_a_row = 0
        return content

    # -- on the remote's thread --------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self._loop.run_until_complete(asyncio.wait(tasks, timeout=1.0))
            self._loop.close()

    async def _head(self, stored: str) -> int | None:
        async with self._small:
            size = await self._timed(self._reading, self._storage.head(stored))
        return None if size is None else max(0, size - self._form.overhead)

    async def _get(self, stored: str, most: int) -> bytearray | None:
        async with self._large:
            read = self._read(stored, most + self._form.overhead)
            return await self._timed(self._reading, read, own_deadline=True)

    async def _read(self, stored: str, most: int) -> bytearray | None:
        """Return the bytes of a stored object; the deadline grows with its size once it is known.

        Raises Corrupt for more than `most` bytes, Failure and TimeoutError.
        """
        async with asyncio.timeout(self._limits.operation_s) as limit:
            found = await self._storage.open(stored)
            if found is None:
                return None
            size, stream = found
            if size > most:
                raise Corrupt(f"it has {size:,} bytes, where at most {most:,} were expected")
            seconds = self._limits.operation_s + size / self._limits.least_down
            limit.reschedule(self._loop.time() + seconds)
            content, done = bytearray(size), 0
            with self._down.transfer() as moved:
                async for part in stream:
                    content[done : done + len(part)] = part
                    done += len(part)
                    moved.add(len(part))
            if done != size or len(content) != size:
                raise Failure("an object ended early", grave=False)
        return content

    async def _put(self, stored: str, wrapped: bytes) -> None:
        seconds = self._limits.operation_s + len(wrapped) / self._limits.least_up
        async with self._large:
            with self._up.transfer() as moved:
                await self._timed(self._writing, self._write(stored, wrapped), seconds)
                moved.add(len(wrapped))

    async def _write(self, stored: str, wrapped: bytes) -> None:
        if self._marks and self._storage.is_folder and await self._storage.head(MARKER) is None:
            raise _unmounted()  # and a new file would be written beside the share
        await self._storage.put(stored, wrapped)

    async def _list(self, prefix: str, limit: int) -> Names:
        async def listed() -> Names:
            found: Names = []
            async for page in self._storage.pages(prefix):
                found += [one.path for one in page]
                if len(found) >= limit:
                    break
            return found[:limit]

        async with self._small:
            return await self._timed(self._reading, listed())

    async def _delete(self, stored: str) -> None:
        async with self._small:
            await self._timed(self._writing, self._storage.delete(stored))

    async def _timed(
        self,
        breaker: Breaker,
        work: Coroutine[Any, Any, T],
        seconds: float | None = None,
        *,
        own_deadline: bool = False,
        probe: bool = False,
    ) -> T:
        """Await `work` with a deadline, and record its outcome in `breaker`. Raises Failure.

        An error Corrupt of `work` is raised too, and not recorded. `seconds`: the deadline,
        `Limits.operation_s` if None. `own_deadline`: `work` has one itself. `probe`: `work` is
        awaited even while the breaker is open, and `_probe` records its failure.
        """
        if breaker.is_open and not probe:
            work.close()
            raise Failure(breaker.reason or "it is skipped", grave=False)
        try:
            limit = None if own_deadline else seconds or self._limits.operation_s
            async with asyncio.timeout(limit):
                result = await work
        except (Failure, TimeoutError) as error:
            failure = error if isinstance(error, Failure) else too_slow()
            if not probe:
                self._record(breaker, failure)
            raise failure from error
        breaker.succeed()
        self._announce()
        return result

    def _record(self, breaker: Breaker, failure: Failure) -> None:
        if failure.gone:  # while nothing is read, nothing is written either
            breaker = self._reading
        breaker.fail(str(failure), grave=failure.grave)
        self._announce()
        if (self._reading.is_open or self._writing.is_open) and self._probing is None:
            self._probing = self._loop.create_task(self._probe())

    # -- probes and the marker ---------------------------------------------------------------

    async def _probe(self) -> None:
        """Probe the remote, with a pause before each probe, until no breaker is open.

        A probe reads the marker while the breaker of reading is open, and else writes it.
        """
        try:
            while self._reading.is_open or self._writing.is_open:
                breaker = self._reading if self._reading.is_open else self._writing
                await asyncio.sleep(breaker.wait_s)
                try:
                    if breaker is self._reading:
                        await self._check_marker(probe=True)
                    else:
                        await self._write_marker(probe=True)
                except Failure as failure:
                    breaker.postpone(str(failure))
        finally:
            self._probing = None

    async def _check_marker(self, *, probe: bool) -> None:
        found = await self._timed(
            self._reading, self._read_marker(probe=probe), own_deadline=True, probe=probe
        )
        if found is None and self._marks and not self._writing.is_open:
            await self._write_marker(probe=False)

    async def _read_marker(self, *, probe: bool) -> bytearray | None:
        try:
            found = await self._read(MARKER, MARKER_BYTES)
        except Corrupt as error:
            raise Failure(f"its object {MARKER} is damaged: {error}", grave=True) from error
        if found is None and probe and self._storage.is_folder:
            raise _unmounted()
        if found is not None and (wrong := wrong_key(found, self._form.key_id)):
            raise WrongKey(wrong)
        return found

    async def _write_marker(self, *, probe: bool) -> None:
        content = {"format": "mlxcache-remote", "version": 1, "key": self._form.key_id}
        work = self._storage.put(MARKER, json.dumps(content).encode())
        await self._timed(self._writing, work, probe=probe)

    # -- state -------------------------------------------------------------------------------

    def _announce(self) -> None:
        state, reason = self._state()
        if state == self._announced:
            return
        self._announced, self._since = state, time.time()
        if state == "ok":
            log.info("remote is used: %s", self.url)
        elif state == "read-only":
            log.warning("remote is read but not written: %s: %s", self.url, reason)
        else:
            log.warning("remote is not used: %s: %s", self.url, reason)

    def _state(self) -> tuple[str, str | None]:
        if self._reading.is_open:
            return "unavailable", self._reading.reason
        return ("read-only" if self._writing.is_open else "ok"), self._writing.reason


def _unmounted() -> Failure:
    reason = f"its folder has no {MARKER} now: it is not mounted, or was emptied"
    return Failure(reason, grave=True, gone=True)


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    return list(await asyncio.gather(*work))


async def _most(work: Sequence[Coroutine[Any, Any, T]]) -> list[T | Corrupt | None]:
    """Await all coroutines at once and return their results, None for those that failed.

    An error Corrupt is returned in place of a result. Raises a failure if all of them failed.
    """
    found = await asyncio.gather(*work, return_exceptions=True)
    failures = [one for one in found if isinstance(one, Failure)]
    if failures and len(failures) == len(found):
        raise failures[0]
    for one in found:
        if isinstance(one, BaseException) and not isinstance(one, Failure | Corrupt):
            raise one
    return [
        one if isinstance(one, Corrupt) or not isinstance(one, BaseException) else None
        for one in found
    ]


def wrong_key(marker: bytearray, key_id: str | None) -> str | None:
    """Return why a remote with this marker cannot be used with a key; None if it can.

    Raises Failure if the marker is damaged.
    """
    try:
        known = json.loads(marker)
        version, theirs = known["version"], known["key"]
        if not isinstance(version, int) or not isinstance(theirs, str | None):
            raise TypeError("a field has the wrong type")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Failure(f"its object {MARKER} is damaged", grave=True) from error
    if version != 1:
        return f"it was made by another version of mlxcache (format {version}): use another prefix"
    if theirs == key_id:
        return None
    if theirs is None:
        return "its objects are not sealed: leave out --remote-key-file, or use another prefix"
    if key_id is None:
        return "its objects are sealed: set --remote-key-file, or use another prefix"
    return "its objects are sealed with another key: use that --remote-key-file, or another prefix"


def open_remote(
    url: str | RemoteUrl,
    *,
    key: bytes | None = None,
    limits: Limits = LIMITS,
    marks: bool = True,
) -> Objects:
    """Open the remote at `url`, check its key and return it; see `Objects`.

    A remote that cannot be reached is skipped until it can be. `key`: 32 bytes to seal names and
    contents with. Raises ConfigError for a URL that cannot be used, and for another key.
    """
    try:
        address = read_remote_url(url)
    except ValueError as error:
        raise ConfigError(f"--remote {error}") from error
    objects = Objects(Storage(address), form_of(key), limits, marks=marks)
    try:
        objects.check()
    except ConfigError:
        objects.close()
        raise
    return objects


def form_of(key: bytes | None) -> Plain:
    if key is None:
        return Plain()
    from mlxcache.remote.sealing import Sealed  # noqa: PLC0415 - a library more

    return Sealed(key)


def open_configured(settings: Settings, *, marks: bool = True) -> Objects:
    """Open the remote of `settings` as `open_remote` does, with its key file if there is one."""
    if settings.remote is None:
        raise ConfigError("there is no remote: set --remote URL")
    file = settings.remote_key_file
    key = None if file is None else read_remote_key(file)
    return open_remote(settings.remote, key=key, marks=marks)
