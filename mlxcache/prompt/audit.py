"""Audit of one request: texts that are likely to change in the next one, and what that costs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlxcache.prompt.advice import advice_for
from mlxcache.prompt.explain import Source
from mlxcache.prompt.text_change import excerpt
from mlxcache.prompt.volatile import find_announced
from mlxcache.types import Chat

_MACHINE = re.compile(r"<(system-reminder|env|environment_context|context)>")
"""Opening tag of text in a user's message that clients generate for each session."""
_KEY = 120
"""Number of characters before and after a place that identify it in the rendered text."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A text in a request that is likely to change in the next one.

    `cause`: kind of the text, such as `date`. `where`: the part of the conversation that contains
    it, such as `tools[2] Read`. `line`: line in that part's text, from 1. `text`: the text itself,
    at most 200 characters. `excerpt`: the text around it. `at_token`: its token position in the
    prompt, or None if it is not rendered or is removed. `tokens_behind`: number of tokens that must
    be computed again when it changes. `rule`: canonicalisation rule that removes it, so that no
    tokens are computed again, or None.
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
        """Advice to the user on how to avoid the change, chosen by `cause`."""
        return advice_for(self.cause)


def audit(
    source: Source,
    position: Callable[[Source, int], int],
    tokens: int,
    *,
    order_kept: bool = False,
) -> list[Finding]:
    """Return the texts of a request that are likely to change in the next one, sorted by position.

    Texts that the template does not render follow, and then those that canonicalisation removed.
    Examines tools, their order, system messages, and text between tags such as `<system-reminder>`
    in user messages. `source`: the request's conversation, as sent and as rendered. `tokens`:
    length of the prompt. `position(source, char)` returns the number of tokens before a character
    of the rendered text. `order_kept`: the canonicalisation rule `tool_order` is on, so a change of
    the tools' order costs no tokens.
    """
    found = [
        one
        for one in _found(source.chat, source, position, tokens)
        if one.text not in source.canonical.names
    ]
    left = {(one.cause, one.text) for one in found}
    rules = source.canonical.rules
    removed = [
        replace(one, rule=one.cause, at_token=None, tokens_behind=0)
        for one in _found(source.sent, source, position, tokens)
        if one.cause in rules and (one.cause, one.text) not in left
    ]
    order = list(_order(source, position, tokens))
    if order_kept:
        removed += [
            replace(one, rule="tool_order", at_token=None, tokens_behind=0) for one in order
        ]
    else:
        found += order
    return [*sorted(found, key=lambda one: (one.at_token is None, one.at_token or 0)), *removed]


def _found(
    chat: Chat, source: Source, position: Callable[[Source, int], int], tokens: int
) -> Iterator[Finding]:
    text = source.tokenised.text
    for where, part, as_json in _parts(chat):
        git_seen = False
        for one in find_announced(part):
            if one.cause == "git_status" and git_seen:
                continue  # further lines of the same status
            git_seen = git_seen or one.cause == "git_status"
            char = _place(text, part, one.start, as_json=as_json)
            at = None if char is None else position(source, char)
            line = part.count("\n", 0, one.start) + 1
            value = part[one.start : one.end][:200]
            behind = 0 if at is None else tokens - at
            yield Finding(one.cause, where, line, value, excerpt(part, one.start), at, behind)


def _parts(chat: Chat) -> Iterator[tuple[str, str, bool]]:
    """Yield the machine-made texts of a conversation as (place, text, as_json).

    `place`: part of the conversation, such as `system` or `tools[2] Read`. `as_json`: the template
    is expected to render the text as JSON.
    """
    for i, tool in enumerate(chat.tools):
        function = tool.get("function") or tool
        for text in _strings(function):
            yield f"tools[{i}] {function.get('name')}", text, True
    leading = True
    for i, message in enumerate(chat.messages):
        role, texts = message.get("role"), _texts(message)
        if role in ("system", "developer"):
            for text in texts:
                yield "system" if leading else f"messages[{i}] {role}", text, False
            continue
        leading = False
        for text in texts if role == "user" else ():
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


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    listed = content if isinstance(content, list) else [content]
    return [part for part in listed if isinstance(part, str)]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _place(rendered: str, part: str, at: int, *, as_json: bool) -> int | None:
    """Return the character offset in a rendered prompt of character `at` of the text `part`.

    Returns None if the text is not found. `as_json`: the template renders `part` as JSON.
    """
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


def _order(
    source: Source, position: Callable[[Source, int], int], tokens: int
) -> Iterator[Finding]:
    """Yield a finding if the tools are not sorted by name, because their order may change.

    `position(source, char)` returns the number of tokens before a character of the rendered text.
    `tokens`: length of the prompt.
    """
    names = [str((tool.get("function") or tool).get("name")) for tool in source.chat.tools]
    i = next((i for i in range(1, len(names)) if names[i] < names[i - 1]), None)
    if i is None:
        return
    seen = f"{names[i - 1]}, {names[i]}"
    char = source.tokenised.text.find(json.dumps(names[i]))
    at = position(source, char) if char >= 0 else None
    behind = 0 if at is None else tokens - at
    yield Finding("tool_order", f"tools[{i}] {names[i]}", 1, names[i], seen, at, behind)
