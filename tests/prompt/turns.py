"""Turns of a conversation in a family's template, as a client of either API sends them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mlxcache.common_prefix import common_length
from mlxcache.prompt.chat_prompt import ChatPrompt
from mlxcache.prompt.next_turn import append_reply
from mlxcache.scheduling.anticipate import NEAR_MARK
from mlxcache.types import (
    Finished,
    FinishReason,
    Piece,
    Text,
    Thinking,
    Tokens,
    ToolCall,
    join_ids,
    token_ids,
)
from mlxcache.wire.anthropic_reply import ContentBlocks
from mlxcache.wire.chat_bodies import request_to_chat
from mlxcache.wire.openai_reply import Envelope, chat_completion
from mlxcache.wire.reply import WholeReply
from tests.prompt.chats import TOOLS
from tests.prompt.families import Calls
from tests.prompt.replaying import Served, resorted

Body = dict[str, Any]
Trim = Callable[[list[str]], Sequence[str]]

APIS = ("chat", "messages")
HEAD = "You are a coding agent. " * 12


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Ids that were computed, shape (n,), and where a model with recurrent layers has a state."""

    ids: Tokens
    states: tuple[int, ...]

    def reused(self, prompt: Tokens, *, recurrent: bool) -> int:
        """How many of a prompt's tokens need not be fed; one always is."""
        shared = min(common_length(self.ids, prompt), len(prompt) - 1)
        return max((at for at in self.states if at <= shared), default=0) if recurrent else shared


@cache
def model_of(name: str) -> Served:
    """A family's model, which all conversations share, as those of a server do."""
    return Served(name)


class Client:
    """A client of an API with its conversation.

    `thoughts`: it sends thinking back; `renames`: its calls have ids of its own; `trim`: what it
    makes of a reply's text blocks. `news`: the texts that are new in its last request.
    """

    def __init__(
        self, api: str, *, thoughts: bool = True, renames: bool = False, trim: Trim | None = None
    ):
        self.api, self.thoughts = api, thoughts
        self.renames, self.trim = renames, trim
        self.body: Body = {"model": "m", "max_tokens": 99, "messages": [], "tools": tools_of(api)}
        if api == "messages":
            self.body["system"] = HEAD
        else:
            self.body["messages"].append({"role": "system", "content": HEAD})
        self.news: list[str] = []

    def user(self, text: str) -> None:
        self.body["messages"].append({"role": "user", "content": text})
        self.news = [text]

    def results(self, text: str) -> None:
        """A result of each call of the last reply."""
        ids = self._calls()
        assert ids
        texts = [f"{text} {n}" for n in range(len(ids))]
        if self.api == "messages":
            blocks = [
                {"type": "tool_result", "tool_use_id": id, "content": said}
                for id, said in zip(ids, texts, strict=True)
            ]
            self.body["messages"].append({"role": "user", "content": blocks})
        else:
            for id, said in zip(ids, texts, strict=True):
                self.body["messages"].append({"role": "tool", "tool_call_id": id, "content": said})
        self.news = texts

    def _calls(self) -> list[str]:
        last = self.body["messages"][-1]
        if self.api == "messages":
            return [block["id"] for block in last["content"] if block["type"] == "tool_use"]
        return [call["id"] for call in last.get("tool_calls", ())]

    def takes(self, pieces: Sequence[Piece]) -> None:
        """A reply, which goes into the history as this client sends it back."""
        self.body["messages"].append(self._as_client(self._sent_back(pieces)))

    def _as_client(self, message: Body) -> Body:
        content = message["content"]
        calls = message.get("tool_calls", ())
        if isinstance(content, list):
            calls = [block for block in content if block["type"] == "tool_use"]
        for call in calls if self.renames else ():
            call["id"] = f"fc_{len(self.body['messages'])}_{call['id'][-4:]}"
        return message if self.trim is None else trimmed(message, self.trim)

    def _sent_back(self, pieces: Sequence[Piece]) -> Body:
        if self.api == "messages":
            blocks = ContentBlocks()
            for piece in pieces:
                blocks.feed(piece)
            blocks.close()
            content = [_rewritten(block) for block in blocks.content]
            if not self.thoughts:
                content = [block for block in content if block["type"] != "thinking"]
            return {"role": "assistant", "content": content}
        reply = WholeReply(
            Finished("stop", 0, 0, 0, 0),
            "".join(p.text for p in pieces if isinstance(p, Text)),
            "".join(p.text for p in pieces if isinstance(p, Thinking)),
            [p for p in pieces if isinstance(p, ToolCall)],
        )
        made = chat_completion([reply], Envelope("c", "m", "chat.completion"))
        message: Body = made["choices"][0]["message"]
        for call in message.get("tool_calls", ()):
            arguments = resorted(json.loads(call["function"]["arguments"]))
            call["function"]["arguments"] = json.dumps(arguments)
        if not self.thoughts:
            message.pop("reasoning_content", None)
        return message


class Talk(Client):
    """A conversation with a family's model, whose replies are the test's own.

    `generated` is what prompts and replies computed, `ahead` what was anticipated.
    """

    def __init__(self, name: str, api: str, model: Served | None = None, **client: Any):
        super().__init__(api, **client)
        self.model = model or model_of(name)
        self.generated: list[Held] = []
        self.ahead: list[Held] = []

    @property
    def size(self) -> int:
        """Tokens of the texts that are new in the last prompt."""
        encode = self.model.tokenizer.encode
        return sum(len(encode(text, add_special_tokens=False)) for text in self.news)

    def ask(self, stop: Sequence[str] = ()) -> ChatPrompt:
        self.prompt = self.model.builder.chat(request_to_chat(self.body), "s", stop)
        return self.prompt

    def fed(self, *, ahead: bool, recurrent: bool = False) -> int:
        """Tokens that the last prompt feeds, by what was computed `ahead` too or without that."""
        ids = self.prompt.ids
        held = [*self.generated, *(self.ahead if ahead else ())]
        return len(ids) - max((one.reused(ids, recurrent=recurrent) for one in held), default=0)

    def replies(
        self, raw: str, *, reason: FinishReason = "stop", stop: Sequence[str] = ()
    ) -> list[Piece]:
        prompt, chat = self.prompt, request_to_chat(self.body)
        ids = self.model.ids(raw)
        pieces, out = self.model.pieces(prompt, ids, chat.tools, reason=reason, stop=stop)
        all_of_it = join_ids(prompt.ids, token_ids(out))
        computed = len(all_of_it) - 1  # the last token was drawn and is fed by what follows
        self.generated.append(Held(all_of_it[:computed], (*prompt.marks, computed)))
        self._anticipate(prompt, pieces, stop)
        self.takes(pieces)
        return pieces

    def says(self, thinking: str, text: str, calls: Calls = ()) -> list[Piece]:
        """A whole reply as the family's model writes it."""
        return self.replies(self.model.family.writes(thinking, text, calls))

    def _anticipate(self, prompt: ChatPrompt, pieces: list[Piece], stop: Sequence[str]) -> None:
        thoughts = self.api == "messages"
        chat = append_reply(prompt.sent, pieces, prompt.names, thoughts=thoughts)
        ahead = self.model.builder.next_turn(chat, "s", stop)
        target = len(ahead.ids) - 1
        last = max((mark for mark in ahead.marks if mark < target), default=0)
        end = last if 0 < target - last <= NEAR_MARK else target
        states = (*(mark for mark in ahead.marks if mark <= end), end)
        self.ahead.append(Held(ahead.ids[:target], states))


def trimmed(message: Body, trim: Trim) -> Body:
    """A reply with other text blocks; where the first one stood, if there is one."""
    content = message["content"]
    if isinstance(content, str):
        texts = list(trim([content]))
        parts = [{"type": "text", "text": text} for text in texts]
        return {**message, "content": parts if len(parts) > 1 else "".join(texts)}
    if not isinstance(content, list):
        return message
    first = next((n for n, one in enumerate(content) if one["type"] == "text"), None)
    if first is None:
        return message
    texts = list(trim([one["text"] for one in content if one["type"] == "text"]))
    made = [{"type": "text", "text": text} for text in texts]
    others = [one for one in content[first:] if one["type"] != "text"]
    return {**message, "content": [*content[:first], *made, *others]}


def _rewritten(block: Body) -> Body:
    if block["type"] == "tool_use":
        return {**block, "input": resorted(block["input"])}
    return block


def tools_of(api: str) -> list[Body]:
    if api == "chat":
        return [dict(tool) for tool in TOOLS]
    functions: list[Any] = [tool["function"] for tool in TOOLS]
    return [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
        for f in functions
    ]
