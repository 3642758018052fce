"""Audit of one request: texts that are likely to change in the next one, and what that costs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from mlxcache.explain.causes import advice_for, find_announced
from mlxcache.explain.differences import excerpt
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.canonical.draft import SYSTEM, strings
from mlxcache.prompt.chat_prompt import ChatPrompt
from mlxcache.types import Chat

_MACHINE = re.compile(r"<(system-reminder|env|environment_context|context)>")
"""Opening tag of text in a user's message that clients generate for each session."""
_KEY = 120


@dataclass(frozen=True, slots=True)
class Finding:
    """A text in a request that is likely to change in the next one.

    `where`: the part that contains it, such as `tools[2] Read`. `line`: line in that part, from 1.
    `excerpt`: the text around it. `at_token`: its position in the prompt; None if it is not
    rendered or is removed. `tokens_behind`: tokens to be computed again when it changes. `rule`:
    canonicalisation rule that removes it, or None.
    """

    cause: str
    where: str
    line: int
    text: str
    excerpt: str
    at_token: int | None
    tokens_behind: int
    rule: str | None = None

    @property
    def advice(self) -> str:
        return advice_for(self.cause)


def audit(builder: PromptBuilder, prompt: ChatPrompt) -> list[Finding]:
    """Return the texts of a request that are likely to change in the next one, sorted by position.

    Texts that the template does not render follow, and then those that canonicalisation removed.
    """
    found = [one for one in _found(builder, prompt, prompt.chat) if one.text not in prompt.names]
    left = {(one.cause, one.text) for one in found}
    removed = [
        replace(one, rule=one.cause, at_token=None, tokens_behind=0)
        for one in _found(builder, prompt, prompt.sent)
        if one.cause in prompt.rules and (one.cause, one.text) not in left
    ]
    order = list(_order(builder, prompt))
    if builder.canonicaliser.is_on("tool_order"):
        removed += [
            replace(one, rule="tool_order", at_token=None, tokens_behind=0) for one in order
        ]
    else:
        found += order
    return [*sorted(found, key=lambda one: (one.at_token is None, one.at_token or 0)), *removed]


def _found(builder: PromptBuilder, prompt: ChatPrompt, chat: Chat) -> Iterator[Finding]:
    for where, part, as_json in _parts(chat):
        git_seen = False
        for one in find_announced(part):
            if one.cause == "git_status" and git_seen:
                continue  # further lines of the same status
            git_seen = git_seen or one.cause == "git_status"
            char = _place(prompt.tokenised.text, part, one.start, as_json=as_json)
            at, behind = _position(builder, prompt, char)
            line = part.count("\n", 0, one.start) + 1
            value = part[one.start : one.end][:200]
            yield Finding(one.cause, where, line, value, excerpt(part, one.start), at, behind)


def _position(
    builder: PromptBuilder, prompt: ChatPrompt, char: int | None
) -> tuple[int | None, int]:
    if char is None:
        return None, 0
    at = builder.text_position(prompt, char)
    return at, len(prompt.ids) - at


def _parts(chat: Chat) -> Iterator[tuple[str, str, bool]]:
    """Yield the machine-made texts of a conversation as (place, text, whether rendered as JSON)."""
    for i, tool in enumerate(chat.tools):
        function = tool.get("function") or tool
        for text in strings(function, keys=False):
            yield f"tools[{i}] {function.get('name')}", text, True
    leading = True
    for i, message in enumerate(chat.messages):
        role, content = message.get("role"), message.get("content")
        listed = content if isinstance(content, list) else [content]
        leading = leading and role in SYSTEM
        for text in (part for part in listed if isinstance(part, str)):
            if role in SYSTEM:
                yield "system" if leading else f"messages[{i}] {role}", text, False
            elif role == "user":
                for part in _machine_made(text):
                    yield f"messages[{i}] {role}", part, False


def _machine_made(text: str) -> Iterator[str]:
    """Yield the parts of a text between the tags `_MACHINE`, tags included.

    A tag that is closed nowhere is searched to the end once, not from each place that opens it.
    """
    at, unclosed = 0, set()
    while opened := _MACHINE.search(text, at):
        at, closing = opened.end(), f"</{opened[1]}>"
        end = -1 if closing in unclosed else text.find(closing, at)
        if end < 0:
            unclosed.add(closing)
        else:
            at = end + len(closing)
            yield text[opened.start() : at]


def _place(rendered: str, part: str, at: int, *, as_json: bool) -> int | None:
    start = max(0, at - _KEY)
    before, key = part[start:at], part[start : at + _KEY]
    forms = [(before, key)]
    if as_json:
        forms = [
            (json.dumps(before, ensure_ascii=a)[1:-1], json.dumps(key, ensure_ascii=a)[1:-1])
            for a in (False, True)
        ] + forms
    forms += [(lead.lstrip(), whole.strip()) for lead, whole in forms]  # templates trim
    for lead, whole in forms:
        found = rendered.find(whole)
        if found >= 0:
            return found + len(lead)
    return None


def _order(builder: PromptBuilder, prompt: ChatPrompt) -> Iterator[Finding]:
    """Yield a finding if the tools are not sorted by name, because their order may change."""
    names = [str((tool.get("function") or tool).get("name")) for tool in prompt.chat.tools]
    i = next((i for i in range(1, len(names)) if names[i] < names[i - 1]), None)
    if i is None:
        return
    char = prompt.tokenised.text.find(json.dumps(names[i]))
    at, behind = _position(builder, prompt, char if char >= 0 else None)
    seen = f"{names[i - 1]}, {names[i]}"
    yield Finding("tool_order", f"tools[{i}] {names[i]}", 1, names[i], seen, at, behind)
