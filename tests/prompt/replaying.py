"""Prompts, made-up replies, and the messages that a client receives."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from mlxcache.common_prefix import common_length
from mlxcache.model.output import OutputParser, reader
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.chat_prompt import ChatPrompt, make_reply
from mlxcache.prompt.replies import Replies
from mlxcache.types import (
    TEXTS,
    Chat,
    FinishReason,
    Piece,
    Prompt,
    Text,
    Thinking,
    Tokens,
    ToolCall,
    join_ids,
    token_ids,
)
from tests.prompt import families
from tests.prompt.chats import TOOLS
from tests.prompt.families import FAMILIES, Calls

Message = dict[str, Any]


class Served:
    def __init__(self, name: str, rules: Mapping[str, bool] | None = None, seed: int = 0):
        self.family = FAMILIES[name]
        self.tokenizer = families.tokenizer(name)
        self.replies = Replies()
        self.builder = PromptBuilder(
            self.tokenizer, rules=rules, read=reader(self.tokenizer), replies=self.replies
        )
        self._random = random.Random(seed)

    def asked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = TOOLS
    ) -> ChatPrompt:
        return self.builder.chat(Chat(list(messages), tools), "s")

    def ids(self, raw: str) -> list[int]:
        """Ids of a text in which ordinary text is cut at odd places, as models do."""
        ids: list[int] = []
        for piece in self.tokenizer.encode(raw, add_special_tokens=False):
            text = self.tokenizer.decode([piece])
            cut = self._random.randrange(1, len(text)) if len(text) > 1 else 0
            plain = text.isascii() and text not in self.family.controls
            if cut and plain and self._random.random() < 0.5:
                for part in (text[:cut], text[cut:]):
                    ids += self.tokenizer.encode(part, add_special_tokens=False)
            else:
                ids.append(piece)
        return ids

    def writes(self, thinking: str, text: str, calls: Calls) -> list[int]:
        return self.ids(self.family.writes(thinking, text, calls))

    def pieces(
        self,
        prompt: Prompt,
        ids: Sequence[int],
        tools: Sequence[Any] = TOOLS,
        *,
        reason: FinishReason = "stop",
        stop: Sequence[str] = (),
    ) -> tuple[list[Piece], list[int]]:
        """The parsed pieces of a reply, which is remembered, and its ids up to its end."""
        parser = OutputParser(
            self.tokenizer,
            tools=tools,
            stop=stop,
            thinking_open=prompt.thinking_open,
            generic_tools=prompt.generic_tools,
        )
        pieces: list[Piece] = []
        out = []
        for token in ids:
            out.append(token)
            pieces += parser.feed(token)
            if parser.done is not None:
                break
        pieces += parser.finish(reason)
        stopped = parser.stop_sequence
        self.last = make_reply(prompt, out, calls=bool(tools), stopped=stopped)
        self.builder.remember(self.last)
        return pieces, out

    def reply(
        self,
        prompt: Prompt,
        ids: Sequence[int],
        tools: Sequence[Any] = TOOLS,
        *,
        reason: FinishReason = "stop",
        stop: Sequence[str] = (),
    ) -> tuple[Message, Tokens]:
        """The message that the client receives, and the ids that the cache then holds."""
        pieces, out = self.pieces(prompt, ids, tools, reason=reason, stop=stop)
        message: Message = {
            "role": "assistant",
            "content": "".join(p.text for p in pieces if isinstance(p, Text)),
        }
        if thinking := "".join(p.text for p in pieces if isinstance(p, Thinking)):
            message["reasoning_content"] = thinking
        calls = [
            {
                "id": p.id,
                "type": "function",
                "function": {"name": p.name, "arguments": resorted(json.loads(p.arguments))},
            }
            for p in pieces
            if isinstance(p, ToolCall)
        ]
        if calls:
            message["tool_calls"] = calls
        return message, join_ids(prompt.ids, token_ids(out))


def resorted(value: Any) -> Any:
    """A JSON value as a client's library rewrites it: keys reversed, integers as floats."""
    if isinstance(value, dict):
        return {key: resorted(value[key]) for key in sorted(value, reverse=True)}
    if isinstance(value, list):
        return [resorted(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def results(message: Message, text: str = "It is so.") -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": f"{text} {n}"}
        for n, call in enumerate(message.get("tool_calls", ()))
    ]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def without_thinking(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def thinking_as_text(message: Message) -> Message:
    """As Zed sends it: one block of text before those of the reply."""
    thinking, text = message.get("reasoning_content"), message["content"]
    if not thinking:
        return message
    blocks = tuple(block for block in (thinking, text) if block)
    return without_thinking(message) | {"content": "\n\n".join(blocks), TEXTS: blocks}


def fed(prompt: Prompt, held: Tokens) -> int:
    return len(prompt.ids) - common_length(held, prompt.ids)
