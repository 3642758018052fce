"""What the prompt layer asks of a tokenizer, and the added tokens that it reads from one."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class ChatTokenizer(Protocol):
    """A tokenizer with a chat template, as mlx-lm wraps those of transformers.

    `_tokenizer` is the transformers tokenizer; where that one has a `backend_tokenizer`, it is
    the `tokenizers.Tokenizer` that does the work, which may be called from many threads.
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
    """One added token: its text is found in any text before the tokenizer proper sees it."""

    id: int
    text: str
    special: bool
    normalized: bool = False
    single_word: bool = False


def added_tokens(tokenizer: ChatTokenizer) -> tuple[Added, ...]:
    """The added tokens, ascending by id; without a Rust backend as far as transformers says."""
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
    """The Rust `tokenizers.Tokenizer`, or None where there is none or a class is in its way."""
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
    """Those of the added tokens that steer the model, which text must never become.

    These are the special ones, those that the chat template `source` writes, the `markers`
    (think and tool-call marks), and those shaped like `<|name|>` or `<unused7>`. The rest,
    runs of blanks or HTML tags kept whole by some vocabularies, are ordinary text.
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


def thinking_marks(tokenizer: ChatTokenizer) -> list[str]:
    """What opens and closes thinking, as far as the model has it."""
    return [mark for mark in (tokenizer.think_start, tokenizer.think_end) if mark]


def tool_marks(tokenizer: ChatTokenizer) -> list[str]:
    """What opens and closes calls of tools, as far as the model has it."""
    names = ("tool_call_start", "tool_call_end")
    return [mark for name in names if isinstance(mark := getattr(tokenizer, name, None), str)]


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the leftmost of `texts`, and the longest where several start.

    It is a trie, so that thousands of tokens cost no more per character than a few.
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
