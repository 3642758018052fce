"""The tokenizer interface that prompts need, and the added tokens of a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class ChatTokenizer(Protocol):
    """Interface of a tokenizer with a chat template, such as mlx-lm's wrapper.

    `_tokenizer`: the wrapped transformers tokenizer.
    """

    _tokenizer: Any

    @property
    def has_chat_template(self) -> bool: ...
    @property
    def has_thinking(self) -> bool: ...
    @property
    def think_start(self) -> str | None: ...
    @property
    def think_end(self) -> str | None: ...

    def apply_chat_template(self, messages: Any, /, **kwargs: Any) -> Any: ...
    def get_added_vocab(self) -> Mapping[str, int]: ...
    def encode(self, text: str, /, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Added:
    """An added token, as in `tokenizers`: its text is matched before the rest is tokenised."""

    id: int
    text: str
    special: bool
    normalized: bool = False
    single_word: bool = False


def added_tokens(tokenizer: ChatTokenizer) -> tuple[Added, ...]:
    backend = backend_of(tokenizer)
    if backend is None:
        known = set(getattr(tokenizer._tokenizer, "all_special_tokens", ()))
        vocabulary = tokenizer.get_added_vocab()
        return tuple(
            Added(token_id, text, text in known)
            for text, token_id in sorted(vocabulary.items(), key=lambda item: item[1])
            if text
        )
    return tuple(
        Added(token_id, token.content, token.special, token.normalized, token.single_word)
        for token_id, token in sorted(backend.get_added_tokens_decoder().items())
        if token.content
    )


def backend_of(tokenizer: ChatTokenizer) -> Any:
    """Return the Rust `tokenizers.Tokenizer`, which many threads may call, or None.

    A class from outside of transformers that overrides `encode` may tokenise in another way than
    it.
    """
    inner = tokenizer._tokenizer
    for kind in type(inner).__mro__:
        if "encode" in vars(kind) and not kind.__module__.startswith("transformers.tokenization"):
            return None
    return getattr(inner, "backend_tokenizer", None)


_BARS = re.compile(r"[<\[]?[/]?[|｜]\S*[|｜][>\]]?|[<\[][|｜]\S+[>\]]|[<\[]\S+[|｜][>\]]")
_RESERVED = re.compile(r"<(unused|reserved|extra_id)[_-]?\S*>|\[(unused|reserved)[_-]?\S*\]")


def control_tokens(
    added: Iterable[Added], source: str | None, markers: Collection[str]
) -> tuple[Added, ...]:
    """Return the added tokens that control the model, which message text must never become.

    Without the template's `source`, all tokens in angle or square brackets are included. Runs of
    white space or HTML tags are ordinary text.
    """

    def steers(token: Added) -> bool:
        text = token.text.strip()
        return bool(text) and (
            token.special
            or text in markers
            or (source is not None and text in source)
            or (source is None and text[0] in "<[" and text[-1] in ">]")
            or _BARS.fullmatch(text) is not None
            or _RESERVED.fullmatch(text) is not None
        )

    return tuple(token for token in added if steers(token))


def thinking_markers(tokenizer: ChatTokenizer) -> list[str]:
    return [text for text in (tokenizer.think_start, tokenizer.think_end) if text]


def tool_markers(tokenizer: ChatTokenizer) -> list[str]:
    names = ("tool_call_start", "tool_call_end")
    return [text for name in names if isinstance(text := getattr(tokenizer, name, None), str)]


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the leftmost of `texts`, the longest of those that start there.

    Built as a trie, so that thousands of texts cost no more per character than a few.
    """
    root: dict[str, Any] = {}
    for text in texts:
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_trie(root) or r"(?!)")


def _trie(node: dict[str, Any]) -> str:
    branches = [re.escape(char) + _trie(below) for char, below in node.items() if char]
    if not branches:
        return ""
    ends = "" in node
    body = branches[0] if len(branches) == 1 and not ends else f"(?:{'|'.join(branches)})"
    return body + "?" if ends else body
