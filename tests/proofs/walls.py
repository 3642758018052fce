"""Every function that the MLX thread calls for a request raises, one at a time, with others beside.

`python -m tests.proofs.walls` takes an hour; the exit status is 1 if the server ended, a reply was
wrong, memory was lost or a later turn was cold.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import random
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Annotated, Any

import typer

from mlxcache.config import Settings
from mlxcache.engine.engine import Engine
from mlxcache.engine.runtime import ModelRuntime
from mlxcache.errors import GenerationFailed, Inconsistent, MlxcacheError
from mlxcache.types import Finished, Job, OutputFormat, Piece, Sampling, Text
from mlxcache.wire.decode import decode
from mlxcache.wire.openai_request import to_chat
from mlxcache.wire.openai_types import ChatRequest
from tests.accounts import check_accounts, check_at_rest
from tests.engine.running import settled
from tests.scheduled import FAMILIES
from tests.toys.toy import make_toy

ERRORS: tuple[type[Exception], ...] = (TypeError, KeyError, ValueError, MemoryError)
CALLS = (1, 3)
"""The call of a function that raises, counted from when the requests arrive."""

NOT_OF_A_TASK = (
    *("mlxcache.mlx_thread", "mlxcache.residency", "mlxcache.config", "mlxcache.lru"),
    *(
        f"mlxcache.scheduling.scheduler.Scheduler.{name}"
        for name in ("_guard", "_attempt", "_fail")
    ),
    *("mlxcache.scheduling.scheduler.Scheduler._leave", "mlxcache.scheduling.wall"),
)
"""Beginnings of the names of functions that belong to the thread's loop or to the wall itself."""

ACCOUNTS = (
    *("mlxcache.tree", "mlxcache.cache.placement.Placement.charged"),
    "mlxcache.cache.kv_cache.Lease.__init__",
)
"""Those of the KV's own accounts: the server may end, once it has written what is committed."""

WAIT_S = 20.0


class Injected(Exception):
    """Mixed into the errors that are raised on purpose."""


@dataclass(frozen=True)
class Place:
    """A function and where its name is bound: (owner, name) of each binding."""

    name: str
    function: Any
    bindings: tuple[tuple[Any, str], ...]


class Fault:
    """Raises `error` at the `call`-th call of a function on one thread; `happened`: it did."""

    def __init__(self, error: type[Exception], call: int, thread: int):
        self.happened = False
        self._error = type(error.__name__, (Injected, error), {})
        self._left, self._thread = call, thread

    def wrap(self, function: Any) -> Any:
        """Return the function, or descriptor of one, that raises once."""
        if isinstance(function, staticmethod | classmethod):
            return type(function)(self.wrap(function.__func__))
        if isinstance(function, property):
            return property(self.wrap(function.fget), function.fset)

        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread and not self.happened:
                self._left -= 1
                if self._left == 0:
                    self.happened = True
                    raise self._error("on purpose")
            return function(*args, **kwargs)

        return wrapped


def find_places() -> dict[CodeType, Place]:
    """Return every function of the package that can be replaced, by its code."""
    modules = [one for name, one in sys.modules.items() if name.startswith("mlxcache.")]
    found: dict[CodeType, Place] = {}
    bound: dict[int, list[tuple[Any, str]]] = {}
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, FunctionType):
                bound.setdefault(id(value), []).append((module, name))
    for module in modules:
        for name, value in list(vars(module).items()):
            if getattr(value, "__module__", None) != module.__name__:
                continue
            where = f"{module.__name__}.{name}"
            if isinstance(value, FunctionType):
                found[_code(value)] = Place(where, value, tuple(bound[id(value)]))
            elif isinstance(value, type):
                for attribute, one in list(vars(value).items()):
                    code = _code(one)
                    if code is not None:
                        found[code] = Place(f"{where}.{attribute}", one, ((value, attribute),))
    return found


def _code(value: Any) -> Any:
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    value = inspect.unwrap(value) if callable(value) else value
    return getattr(value, "__code__", None)


@contextmanager
def replaced(place: Place, fault: Fault) -> Iterator[None]:
    wrapped = fault.wrap(place.function)
    for owner, name in place.bindings:
        setattr(owner, name, wrapped)
    try:
        yield
    finally:
        for owner, name in place.bindings:
            setattr(owner, name, place.function)


WORDS = ("cache", "prefix", "tree", "lane", "block", "token", "budget", "turn", "disk", "model")


def _said(seed: int, words: int) -> str:
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(words))


@dataclass(frozen=True)
class Talk:
    """A conversation of two turns, and what its requests ask for."""

    first: str
    tokens: int
    more: Mapping[str, Any] = field(default_factory=dict)
    system: str = "You are a server of prefixes. " * 8


TALKS = (
    Talk(_said(1, 60), 24),
    Talk(
        _said(2, 62),
        20,
        {
            "sampling": Sampling(temperature=0.8, seed=3, repetition_penalty=1.1),
            "top_logprobs": 2,
            "stop": ("zzqq",),
        },
    ),
    Talk(_said(3, 160), 12, {"format": OutputFormat("json_object")}),
)


@dataclass(frozen=True)
class Answer:
    text: str = ""
    cached: int = 0
    prompt: int = 0
    error: MlxcacheError | None = None


class Player:
    """Plays the conversations on one engine, each turn of all of them side by side."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._count = 0

    async def ask(self, talk: Talk, messages: Sequence[Mapping[str, Any]]) -> Answer:
        import msgspec

        engine, session = self.engine, talk.first[:12]
        body = decode(ChatRequest, msgspec.json.encode({"messages": messages}))
        self._count += 1
        id = f"req_{self._count}"
        try:
            prompt = await engine.render(to_chat(body), session=session)
            job = Job(
                id, prompt, max_tokens=talk.tokens, session=session,
                client="walls", api="chat", **talk.more,
            )  # fmt: skip
            stream = await engine.submit(job)
            text, last = "", None
            async with stream:
                async for event in stream:
                    if isinstance(event, Text):
                        text += event.text
                    elif isinstance(event, Piece):
                        text += repr(event)
                    elif isinstance(event, Finished):
                        last = event
        except MlxcacheError as error:
            return Answer(error=error)
        assert last is not None
        return Answer(text, last.cached_tokens, last.prompt_tokens)

    async def turn(self, replies: Sequence[str] = ()) -> list[Answer]:
        """Ask the first question of each conversation, or the second after these `replies`."""
        asked = []
        for at, talk in enumerate(TALKS):
            messages = [
                {"role": "system", "content": talk.system},
                {"role": "user", "content": talk.first},
            ]
            if replies:
                messages += [
                    {"role": "assistant", "content": replies[at]},
                    {"role": "user", "content": _said(10 + at, 8)},
                ]
            asked.append(self.ask(talk, messages))
        return list(await asyncio.wait_for(asyncio.gather(*asked), WAIT_S))

    async def rest(self) -> None:
        """Wait until nothing is computed, written or anticipated any more."""

        def busy(runtime: ModelRuntime) -> bool:
            return not runtime.scheduler.idle or runtime.kv.writing

        async with asyncio.timeout(WAIT_S):
            await settled(self.engine)
            while await self.engine.call(busy):  # noqa: ASYNC110 - the thread sets no event
                await asyncio.sleep(0.002)

    async def clear(self) -> None:
        """Make everything cold again."""
        await self.engine.book.writer.written()
        await self.engine.sessions.clear(pinned=True)

    async def check(self) -> str:
        """Return what is wrong with the memory of a server at rest; "" if nothing is."""

        def look(runtime: ModelRuntime) -> str:
            try:
                check_accounts(runtime.kv, runtime.scheduler.lanes)
                check_at_rest(runtime.kv)
            except (AssertionError, Inconsistent) as error:
                return f"memory: {error!r} {runtime.kv.budget.by_kind()}"
            return "" if runtime.scheduler.idle else "requests are in progress"

        return await self.engine.call(look)


@dataclass
class Result:
    """What one fault did. `wrong` names each violation."""

    place: str
    error: str
    call: int
    failed: int = 0
    wrong: list[str] = field(default_factory=list)


class Walls:
    """One engine on a toy of `family`, and what its replies are without a fault."""

    def __init__(self, family: str, folder: Path):
        self.family, self._folder = family, folder
        self._model = make_toy(folder / family, family)
        self._engines = 0

    async def begin(self) -> None:
        """Start an engine, and play once without a fault to know the replies."""
        self._engines += 1
        self.engine = Engine(
            Settings(
                model=str(self._model), ram="200MB", disk="1GB", prefill_chunk=64,
                no_loop_guard=True, cache_dir=self._folder / f"{self.family}-{self._engines}",
            )
        )  # fmt: skip
        await self.engine.start()
        self.player = Player(self.engine)
        self.thread = await self.engine.call(lambda _: threading.get_ident())
        self.first = await self.player.turn()
        await self.player.rest()
        self.second = await self.player.turn([one.text for one in self.first])
        await self.player.rest()
        assert not any(one.error for one in [*self.first, *self.second])
        await self.player.clear()

    async def called(self) -> list[Place]:
        """Return the functions that the MLX thread calls while the conversations are played."""
        places, seen = find_places(), set[CodeType]()

        def note(frame: Any, event: str, _: Any) -> None:
            if event == "call":
                seen.add(frame.f_code)

        await self.engine.call(lambda _: sys.setprofile(note))
        await self.player.turn()
        await self.player.rest()
        await self.player.turn([one.text for one in self.first])
        await self.player.rest()
        await self.engine.call(lambda _: sys.setprofile(None))
        await self.player.clear()
        found = [place for code, place in places.items() if code in seen]
        return sorted(
            (one for one in found if not one.name.startswith(NOT_OF_A_TASK)), key=lambda p: p.name
        )

    async def play(self, place: Place, error: type[Exception], call: int) -> Result | None:
        """Play both turns with a fault; None if the function was not called so often."""
        result = Result(place.name, error.__name__, call)
        fault = Fault(error, call, self.thread)
        try:
            with replaced(place, fault):
                first = await self.player.turn()
                await self.player.rest()
                if fault.happened:
                    second = await self._after(first, result)
                else:
                    second = await self.player.turn([one.text for one in self.first])
                    await self.player.rest()
            if fault.happened:
                self._compare(first, second, result)
                result.wrong += filter(None, [await self.player.check()])
                await self.player.clear()
        except Exception as ended:  # noqa: BLE001 - reported
            result.wrong.append(f"the server ended or hangs: {type(ended).__name__}: {ended}")
        if self.engine.state != "ready":
            result.wrong.append("process end")
        if result.wrong:  # what follows is played on a sound engine
            with_error = asyncio.create_task(self.engine.stop(1.0))
            await asyncio.wait([with_error], timeout=10)
            await self.begin()
        elif not fault.happened:
            await self.player.clear()
        return result if fault.happened else None

    async def _after(self, first: Sequence[Answer], result: Result) -> list[Answer]:
        second = await self.player.turn([one.text for one in self.first])
        await self.player.rest()
        for at, (now, then, before) in enumerate(zip(second, self.second, first, strict=True)):
            if now.error is None and before.error is None and now.cached < then.cached // 2:
                result.wrong.append(f"cold: turn 2 of {at} reused {now.cached} of {then.cached}")
        return second

    def _compare(self, first: Sequence[Answer], second: Sequence[Answer], result: Result) -> None:
        pairs = [*zip(first, self.first, strict=True), *zip(second, self.second, strict=True)]
        for at, (now, then) in enumerate(pairs):
            other = now.prompt != then.prompt  # a forgotten reply is tokenised from its text
            if now.error is None and now.text != then.text and not other:
                result.wrong.append(f"wrong tokens in {at}: {now.text!r} for {then.text!r}")
            elif now.error is not None and not isinstance(now.error, GenerationFailed):
                result.wrong.append(f"error of another kind in {at}: {now.error!r}")
        result.failed = sum(now.error is not None for now, _ in pairs)
        if result.failed > 1 and not result.place.startswith(ACCOUNTS):
            result.wrong.append(f"{result.failed} requests failed")


def _drawn(place: Place, error: type[Exception], call: int) -> float:
    """Return a number from 0 to 1 that is the same in each run, whatever else is called."""
    return zlib.crc32(f"{place.name} {error.__name__} {call}".encode()) / 2**32


async def play(family: str, folder: Path, *, share: float, only: str = "") -> list[Result]:
    """Play a share of the faults, the same ones each time, in functions named like `only`."""
    walls = Walls(family, folder)
    await walls.begin()
    places = [one for one in await walls.called() if only in one.name]
    every = [(place, error, call) for place in places for error in ERRORS for call in CALLS]
    results = [await walls.play(*one) for one in every if _drawn(*one) < share]
    await walls.engine.stop()
    return [one for one in results if one is not None]


def _ended(one: Result) -> bool:
    return "process end" in one.wrong


def main(
    family: Annotated[list[str] | None, typer.Option()] = None,
    share: Annotated[float, typer.Option(help="Part of the faults to play.")] = 1.0,
    only: Annotated[str, typer.Option(help="Functions whose name has this in it.")] = "",
) -> None:
    """Play the faults and print what was wrong, with counts."""
    logging.disable(logging.CRITICAL)
    wrong: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in family or FAMILIES:
            began = time.monotonic()
            results = asyncio.run(play(name, Path(folder), share=share, only=only))
            own = [one for one in results if one.place.startswith(ACCOUNTS)]
            bad = [one for one in results if one.wrong and one not in own]
            for one in bad:
                print(one.place, one.error, one.call, *one.wrong, sep="\n    ")
            print(
                f"{name}: {len(results)} faults in {len({one.place for one in results})} places, "
                f"{sum(one.failed for one in results)} requests failed; outside of the accounts "
                f"{len(bad)} violations, {sum(map(_ended, bad))} of them process ends; "
                f"{len(own)} faults in the accounts, {sum(map(_ended, own))} process ends, "
                f"{sum('wrong tokens' in str(one.wrong) for one in results)} wrong tokens, "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )
            wrong += bad
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
