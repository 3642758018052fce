"""A real server whose replies follow a script.

A toy model cannot call tools or end its turn at the right place, which clients need. Engine,
tokenizer, parser and cache are the product's own, and every token is fed through the model; a
logits processor only restricts each sample to the token of the script.

    with scripted([("read (a|b)", '<tool_call>\\n{...}\\n</tool_call>'), ("", "Done.")], ...):

A script is a list of pairs `(when, reply)`. `when` is a regular expression, searched in the newest
message of a user or of a tool, as the client sent it. The first pair that matches gives the reply:
the text that the model writes, with its control tokens; the end of the turn is added if missing.
If no pair matches, the model replies freely.
`python -m tests.scripted SCRIPT.json serve ...` is `mlxcache serve ...` with such a model.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxcache.engine import engine
from mlxcache.engine.runtime import ModelRuntime
from mlxcache.prompt.chat_prompt import ChatPrompt
from mlxcache.scheduling.task import Output, Task
from tests.forked import served
from tests.served import Served

Line = tuple[str, str]


def reply_to(lines: Sequence[Line], messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the scripted reply to `messages`; None if no pair matches."""
    said = [m for m in messages if m.get("role") in ("user", "tool")]
    content = said[-1].get("content") or "" if said else ""
    parts = [content] if isinstance(content, str) else content
    text = "\n".join(part for part in parts if isinstance(part, str))
    return next((reply for when, reply in lines if re.search(when, text)), None)


def reply_ids(tokenizer: Any, reply: str) -> list[int]:
    """Return the token ids of a reply, with its control tokens and the end of the turn."""
    ids = list(tokenizer.encode(reply, add_special_tokens=False))
    ends = tokenizer.eos_token_ids
    return ids if ids and ids[-1] in ends else [*ids, tokenizer.eos_token_id]


class ScriptedTokens:
    """A logits processor that allows one token per position of the reply.

    Token ids of shape (n,), logits of shape (1, V).
    """

    def __init__(self, ids: Sequence[int], prompt_len: int):
        self._ids = list(ids)
        self._prompt_len = prompt_len

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        at = tokens.shape[0] - self._prompt_len
        token = self._ids[
            min(at, len(self._ids) - 1)
        ]  # one token more is sampled ahead and dropped
        only = mx.arange(logits.shape[-1])[None] == token
        return mx.where(only, mx.zeros_like(logits), -mx.inf)


class ScriptedRuntime(ModelRuntime):
    """A runtime whose replies are the script's."""

    lines: Sequence[Line] = ()

    def prepare_output(self, task: Task) -> Output:
        output = super().prepare_output(task)
        prompt = task.job.prompt
        chat = prompt.sent if isinstance(prompt, ChatPrompt) else None
        reply = reply_to(self.lines, chat.messages) if chat is not None else None
        if reply is None:
            return output
        says = [ScriptedTokens(reply_ids(self.loaded.tokenizer, reply), len(task.fed))]
        row = replace(output.row, processors=says, context=mx.array(task.fed[:-1]))
        return replace(output, row=row)


@contextmanager
def scripted(
    lines: Sequence[Line], *arguments: str, home: Path, environ: dict[str, str] | None = None
) -> Iterator[Served]:
    """`tests.served.served` with a model that follows a script."""
    script = home / "script.json"
    script.write_text(json.dumps(list(lines)), encoding="utf-8")
    with served(
        *arguments, home=home, environ=environ, command=("tests.scripted", str(script))
    ) as server:
        yield server


def main() -> None:
    """Run `mlxcache` with the script named by the first argument."""
    from mlxcache.cli.main import main as mlxcache

    script = Path(sys.argv.pop(1)).read_text(encoding="utf-8")
    ScriptedRuntime.lines = [(when, reply) for when, reply in json.loads(script)]
    engine.ModelRuntime = ScriptedRuntime  # type: ignore[attr-defined]
    mlxcache()


if __name__ == "__main__":
    main()
