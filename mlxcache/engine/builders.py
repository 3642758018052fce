"""What renders: a builder of prompts for each owner, since builders remember what they saw."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from mlxcache.config import Settings
from mlxcache.model.output import reader
from mlxcache.prompt.builder import PromptBuilder

if TYPE_CHECKING:
    from mlxcache.engine.runtime import Core
    from mlxcache.sessions.book import SessionBook


def maker(
    core: Core, settings: Settings, book: SessionBook
) -> Callable[[str | None], PromptBuilder]:
    """What makes builders for the model that is served."""

    def made(owner: str | None) -> PromptBuilder:
        loaded = core.loaded
        builder = PromptBuilder(
            loaded.tokenizer,
            settings.chat_template_args,
            core.info.context_length,
            loaded.vision if core.images else None,
            settings.rules,
            read=reader(loaded.tokenizer),
        )
        builder.others = partial(book.replies, owner)
        return builder

    return made


class Builders:
    """Makes an owner's builder when it is asked for first. Safe in any thread.

    A builder puts replies, results of tools and orders that it has seen back where a client lost
    them, and tokenises faster what it knows: with one for all, that would tell of others' sessions.
    """

    def __init__(self, make: Callable[[str | None], PromptBuilder]):
        self._make = make
        self._lock = Lock()
        self._made: dict[str | None, PromptBuilder] = {}

    def of(self, owner: str | None) -> PromptBuilder:
        """An owner's builder. Making one takes tens of milliseconds."""
        with self._lock:
            if owner not in self._made:
                self._made[owner] = self._make(owner)
            return self._made[owner]
