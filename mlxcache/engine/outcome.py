"""How a reply ends, and what its client is told where it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from mlxcache.engine.decoder import Drawn
from mlxcache.engine.task import Task
from mlxcache.errors import GenerationFailed, MlxcacheError
from mlxcache.types import FinishReason

log = logging.getLogger("mlxcache.engine")

T = TypeVar("T")

Outcome = FinishReason | MlxcacheError
"""How a reply ends."""


def take(task: Task, drawn: Sequence[Drawn]) -> Outcome | None:
    """Hand tokens out until the task is over; why it is, if it is."""
    if not drawn and task.row is not None and task.row.error is not None:
        return failure(task.row.error)
    try:
        outcomes = map(task.take, drawn)
        return next((outcome for outcome in outcomes if outcome is not None), None)
    except Exception as error:  # noqa: BLE001 - `failure` logs it
        return failure(error)


def rendered(make: Callable[[], T]) -> T:
    """What `make` makes of a conversation. Raises GenerationFailed for what a template or a
    tokenizer raises that nobody foresaw; a tokenizer's panic is no `Exception`."""
    try:
        return make()
    except MlxcacheError:
        raise
    except BaseException as error:
        log.exception("a prompt could not be made")
        raise GenerationFailed(
            f"The prompt could not be made: {type(error).__name__}: {error}"
        ) from error


def failure(error: Exception) -> MlxcacheError:
    """What the client is told of `error`, which the log gets whole."""
    if isinstance(error, MlxcacheError):
        return error
    log.error("a request failed", exc_info=error)
    return GenerationFailed(f"The model failed: {error}")
