"""Creation of the guides of one model's replies, from the requests' formats and tools."""

from __future__ import annotations

from threading import Lock
from typing import Any

from mlxcache.model.guidance.grammar import grammar_text, is_constrained
from mlxcache.model.guidance.guide import Grammars, Guide
from mlxcache.model.guidance.thinking import AfterThinking, ThinkFormat, read_format
from mlxcache.types import Job


class Guides:
    """Factory of the guides of one model's replies. Its methods may be called on any thread.

    `tokenizer`: mlx-lm's TokenizerWrapper. `vocab_size`: the width of the logits. `label`: that of
    the model, for the log.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, label: str = "unnamed"):
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer, vocab_size, label)
        self._lock = Lock()
        self._thinking: list[ThinkFormat | None] = []

    def prepare(self) -> None:
        """Read the vocabulary and the form of thinking, once: seconds for a large vocabulary.

        Blocks, also while another thread reads them. Raises Unsupported if the model's tokenizer
        cannot be used.
        """
        self._think_format()

    def needed(self, job: Job) -> bool:
        """Return whether the reply to `job` needs a guide for its format or its tool calls.

        Guides for a thinking budget are not counted: `ThinkingBudget` makes them later.
        """
        return is_constrained(job)

    def make(self, job: Job) -> Guide | None:
        """Return a guide at the beginning of the reply to `job`, or None if the reply is free.

        Blocks, mostly for milliseconds after `prepare`. Raises BadRequest if the format, or the
        schema of a tool, is wrong or cannot be enforced, and Unsupported if the model's tokenizer
        cannot be used or the syntax of its tool calls is unknown.
        """
        text = grammar_text(job, self._tokenizer)
        if text is None:
            return None
        field = job.format.param if job.format is not None else "tools"
        guide, prompt = self._grammars.guide(text, field), job.prompt
        form = None if job.raw else self._think_format()
        if form is None:
            return guide
        may_think = not (prompt.continued or form.is_closed_by(prompt.fed[-32:].tolist()))
        return AfterThinking(form, guide, thinking=prompt.thinking_open, may_think=may_think)

    def _think_format(self) -> ThinkFormat | None:
        with self._lock:
            if not self._thinking:
                self._thinking.append(read_format(self._tokenizer, self._grammars.vocabulary()))
            return self._thinking[0]
