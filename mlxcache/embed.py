"""The engine inside a Python program: a model, its prefix tree and its disk tier, without HTTP.

async with Model("~/models/my-model", ram="8GB") as model:
    reply = await model.chat([{"role": "user", "content": "What is a cache?"}], max_tokens=50)
    print(reply.text, reply.cached_tokens, "of", reply.prompt_tokens)
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import msgspec

from mlxcache.config import SETTINGS, Settings, load_settings
from mlxcache.errors import ConfigError, Unsupported
from mlxcache.names import clean_label
from mlxcache.store.cache_folder import prepare_cache_dir, require_local
from mlxcache.store.lock import serving
from mlxcache.types import FinishReason, Job, ModelInfo, ToolCall
from mlxcache.wire.decode import decode
from mlxcache.wire.openai_request import (
    check_supported,
    read_choices,
    read_format,
    read_max_tokens,
    read_stop_strings,
    read_thinking_budget,
    read_tool_use,
    to_chat,
    to_sampling,
)
from mlxcache.wire.openai_types import ChatRequest
from mlxcache.wire.reply import gather_reply
from mlxcache.wire.titles import title_from_messages

if TYPE_CHECKING:
    from mlxcache.engine.engine import Engine
    from mlxcache.engine.requests import Stream
    from mlxcache.remote.objects import Objects
    from mlxcache.sessions.book import SessionBook

URL = "http://127.0.0.1:0"
"""Address in the folder's lock file for a process that uses the folder but serves no requests."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A finished reply. Counts are in tokens.

    `cached_tokens` are prompt tokens whose KV was reused; `restored_tokens` of them came from disk.
    """

    text: str
    thinking: str
    calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    restored_tokens: int
    generated_tokens: int


class Models:
    """Several models in this process, under one memory budget. Use from one event loop only.

    `models` are folders or Hub ids, the first of which is the default; without them, `settings` has
    `models`, a mapping from names to the keys of [models.NAME] in config.toml. The other settings
    are keys of config.toml, with the same meaning; that file and environment variables are not
    read. Raises ConfigError for an unknown setting, and for a cache folder on a network share.

    `async with` loads the default model, and raises ModelError or ConfigError if it cannot be
    loaded, and InUse while a command changes the cache folder. Another one is loaded by the first
    call that names it, and unloaded when others need its memory.
    """

    def __init__(self, *models: str, **settings: Any):
        self.settings = _read_settings({"model": models or None, **settings})
        # mlx_lm and its HTTP client for downloads are loaded with the first model, not on import
        from mlxcache.engine.models import Models as Engines  # noqa: PLC0415

        self._lock, self._remote = ExitStack(), ExitStack()
        remote = _open_remote(self.settings)
        if remote is not None:
            self._remote.callback(remote.close)
        try:
            self._engines = Engines(self.settings, remote=remote)
        except BaseException:
            self._remote.close()
            raise

    async def __aenter__(self) -> Self:
        settings = self.settings
        if settings.disk != "off":  # commands must not change the folder meanwhile
            used = [one.model for one in settings.entries if one.model is not None]
            name = settings.model or "the demo"
            self._lock.enter_context(serving(settings.cache_dir, URL, name, used))
        try:
            await self._engines.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel running replies, write computed KV to disk, and unload every model. Idempotent."""
        with self._lock:
            await self._engines.stop()
            self._remote.close()

    @property
    def info(self) -> ModelInfo:
        """Description of the default model. Raises RuntimeError outside of `async with`."""
        info = self._engines.default.info
        if info is None:
            raise RuntimeError("The model is loaded inside of `async with`.")
        return info

    @property
    def sessions(self) -> SessionBook:
        """Sessions; `sessions.files` exports and imports snapshots. Raises NotReady outside."""
        return self._engines.sessions

    def describe(self) -> list[dict[str, Any]]:
        """Return the list `models` in the body of `GET /v1/cache`, the default model first."""
        return self._engines.describe()

    def figures(self) -> dict[str, Any]:
        """Return the body of `GET /v1/cache`; empty before the default model is loaded."""
        return self._engines.figures()

    async def load(self, model: str) -> None:
        """Load a model, by name, id or alias, before its first call, or read its weights again.

        The first load is waited for, but reading weights again is not. Raises NotFound for an
        unknown name, ModelError if the load fails, BadRequest or Busy if there is no memory for it.
        """
        engine = await self._engines.of(self._engines.named(model).label)
        await engine.load_weights()

    async def unload(self, model: str) -> None:
        """Drop a model's weights from memory; the next call for it reads them again.

        Raises NotFound for an unknown name, and Busy while replies of the model are computed.
        """
        await self._engines.named(model).unload_weights()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        model: str | None = None,
        session: str | None = None,
        **fields: Any,
    ) -> Reply:
        """Generate a whole reply. Takes the arguments of `stream` and raises its errors."""
        return await _whole(await self.stream(messages, model=model, session=session, **fields))

    async def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        model: str | None = None,
        session: str | None = None,
        **fields: Any,
    ) -> Stream:
        """Generate a reply as a stream of `mlxcache.types.Event`; closing it cancels the reply.

        `messages` and `fields`, such as `max_tokens`, `temperature` or `tools`, are the fields of a
        `POST /v1/chat/completions` body. `session` is the session's label. `model` is chosen as by
        a server: a name, id or alias, or a name that a pattern of the setting `route` matches; else
        the default model replies. Loads it if needed, and raises ModelError, BadRequest or Busy if
        that fails. Raises BadRequest for an invalid or unsupported field, RuntimeError before
        `async with`, and Busy after it or if the queue is full.
        """
        _ = self.info
        return await _stream(await self._engines.of(model), messages, session, fields)


class Model(Models):
    """`Models` with one: a folder or a Hub id, or None for the built-in demo."""

    def __init__(self, model: str | None = None, **settings: Any):
        super().__init__(*(() if model is None else (model,)), **settings)


def _read_settings(given: Mapping[str, Any]) -> Settings:
    unknown = sorted(set(given) - set(SETTINGS))
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]!r}; expected {', '.join(SETTINGS)}")
    wanted = load_settings(given, {"MLXCACHE_CONFIG": os.devnull})
    if wanted.hosts is not None or wanted.hostfile is not None:
        raise ConfigError("only `mlxcache serve` divides a model among machines: leave out hosts")
    if wanted.disk != "off":
        require_local(wanted.cache_dir)
    prepare_cache_dir(wanted.cache_dir)
    return wanted


def _open_remote(settings: Settings) -> Objects | None:
    if settings.remote is None:
        return None
    from mlxcache.remote.objects import open_configured  # noqa: PLC0415 - few programs use it

    return open_configured(settings)


async def _whole(stream: Stream) -> Reply:
    async with stream:
        whole = await gather_reply(stream)
    last = whole.last
    return Reply(
        whole.text,
        whole.thinking,
        tuple(whole.calls),
        last.reason,
        last.prompt_tokens,
        last.cached_tokens,
        last.restored_tokens,
        last.generated_tokens,
    )


async def _stream(
    engine: Engine,
    messages: Sequence[Mapping[str, Any]],
    session: str | None,
    fields: Mapping[str, Any],
) -> Stream:
    session = clean_label(session or "") or None
    raw = msgspec.json.encode({"messages": messages, **fields})
    body = decode(ChatRequest, raw)
    check_supported(body)
    if read_choices(body) > 1:
        raise Unsupported("Only `n`: 1 is supported: submit several requests.", param="n")
    info = engine.info
    chat = to_chat(body, images=info is not None and info.has_images)
    form = read_format(body)
    use = read_tool_use(body, chat.tools)
    prompt = await engine.render(chat, session=session, stop=read_stop_strings(body))
    takes_effort = info is not None and info.takes_effort
    return await engine.submit(
        Job(
            id=f"req_{secrets.token_hex(12)}",
            prompt=prompt,
            sampling=to_sampling(body),
            max_tokens=read_max_tokens(body, engine.settings.max_tokens),
            stop=read_stop_strings(body),
            tools=use.tools,
            tool_choice=use.choice,
            thinking_budget=read_thinking_budget(body, takes_effort=takes_effort),
            parallel_tools=use.parallel,
            format=form,
            session=session,
            client="mlxcache.embed",
            title=title_from_messages(chat.messages),
            api="embed",
        )
    )


__all__ = ["Model", "Models", "Reply"]
