"""The format of gpt-oss: a reply is several messages, each with a header that names its channel.

    <|channel|>analysis<|message|>thinking<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>
    <|start|>assistant<|channel|>final<|message|>text<|return|>

As described in https://cookbook.openai.com/articles/openai-harmony. The prompt ends with
`<|start|>assistant`, so a reply begins within a header.
"""

from __future__ import annotations

import json
import re
from typing import Any

HEADER = "header"
MESSAGE = "<|message|>"
_TOKENS = ("<|start|>", "<|channel|>", MESSAGE, "<|end|>")
_BEGINNINGS = ("<|channel|>", "<|start|>", "to=", "assistant")
_RECIPIENT = re.compile(r"to=([^\s<]+)")


def speaks_harmony(tokenizer: Any) -> bool:
    """Whether the vocabulary has the format's own tokens."""
    ids = [tokenizer.convert_tokens_to_ids(token) for token in _TOKENS]
    return None not in ids and tokenizer.unk_token_id not in ids


def edges(to: str) -> dict[str, dict[str, str]]:
    """The framing; a header's end leads to the state `to`, which stands for `route`."""
    return {
        HEADER: {MESSAGE: to},
        "normal": {"<|end|>": HEADER, "<|start|>": HEADER},
        "reasoning": {"<|end|>": HEADER, "<|start|>": HEADER},
        "tool": {"<|call|>": HEADER, "<|end|>": HEADER},
    }


def route(header: str) -> str:
    """The state that the message after `header` is read in: a recipient makes it a call."""
    if _RECIPIENT.search(header):
        return "tool"
    return "reasoning" if "<|channel|>analysis" in header else "normal"


def may_be_header(text: str) -> bool:
    """Whether `text` can be the beginning of a header; else it is the text of a reply that has
    none, as after a raw prompt."""
    text = text.lstrip()
    return any(text.startswith(b) or b.startswith(text) for b in _BEGINNINGS)


def parse(text: str, _: object = None) -> dict[str, Any]:
    """The call in a message, given with its header. Raises ValueError if it is none."""
    header, _message, body = text.partition(MESSAGE)
    recipient = _RECIPIENT.search(header)
    if recipient is None:
        raise ValueError("the message has no recipient")
    arguments = json.loads(body) if body.strip() else {}
    return {"name": recipient[1].removeprefix("functions."), "arguments": arguments}
