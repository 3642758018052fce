"""Encoding of rendered text to token ids; text of a message never becomes a control token.

Before rendering, the text of a control token inside a message, a tool or an argument is replaced by
a sentinel, a sequence of characters that stands for it. Encoding converts it back to text.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer

from mlxcache.errors import BadRequest
from mlxcache.prompt.tokenizer import Added, ChatTokenizer, any_of, backend_of
from mlxcache.types import Tokens, token_ids

OPEN, CLOSE = "\ue0f4", "\ue0f5"
_DIGITS = 7

_PROBES = (
    "plain words, twice  spaced\n\n\tand indented\n",
    "don't 1234567 x=3.14; naïve café \u65e5\u672c\u8a9e \U0001f980e\u0301",
    " leading and trailing ",
)


_LEAST_PIECE = 1 << 16
_CHARS_PER_TOKEN = 8
"""Characters of such a piece for each token of the limit, if that is more than `_LEAST_PIECE`."""


class Escape:
    """Replaces the text of control tokens by sentinels, and back. Immutable and thread-safe.

    A sentinel consists of decimal digits between two private-use characters: a nonce of this
    object, so that no text contains one by accident or intent, then the code points of the replaced
    text. It contains no letters, quotes or white space, which a template could change. If a
    template writes JSON in ASCII, the sentinel gets JSON escapes, and so does the text that `split`
    returns for it.

    `controls`: the texts to escape; those in `passing` are not escaped in an assistant's content.
    `normalized`: those of `controls` that the tokenizer matches after its normaliser `normalize`; a
    text that contains one after normalisation is replaced as a whole.
    """

    def __init__(
        self,
        controls: Iterable[str],
        passing: Iterable[str] = (),
        normalized: Iterable[str] = (),
        normalize: Callable[[str], str] | None = None,
    ):
        texts = {text for text in controls if text}
        self._normalize = normalize if normalized else None
        self._normal = any_of({normalize(text) for text in normalized} if normalize else ())
        self._all = _Finder(texts)
        self._assistant = _Finder(texts - set(passing))
        self._nonce = f"{secrets.randbelow(10**20):020d}"
        first, last = f"\\u{ord(OPEN):04x}", f"\\u{ord(CLOSE):04x}"
        self._sentinel = re.compile(
            f"(?:{OPEN}|{re.escape(first)}){self._nonce}"
            rf"((?:\d{{{_DIGITS}}})+)(?:{CLOSE}|{re.escape(last)})"
        )
        self.end = f"{OPEN}{self._nonce}{CLOSE}"
        """A sentinel of an empty text, used to find a position in a rendered conversation."""

    def escape_value(self, value: Any) -> Any:
        """Return a copy of a JSON value with every string and key escaped."""
        if isinstance(value, str):
            return self._replace(value, self._all)
        if isinstance(value, dict | Mapping):
            return {self.escape_value(key): self.escape_value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape_value(item) for item in value]
        return value

    def escape_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return an escaped copy of a message; an assistant's content keeps the `passing` texts."""
        escaped: dict[str, Any] = self.escape_value(message)
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, str):
            escaped["content"] = self._replace(content, self._assistant)
        return escaped

    def has_sentinel(self, rendered: str) -> bool:
        return self._nonce in rendered

    def without_nonce(self, rendered: str) -> str:
        """Return the rendered text with the nonce replaced by zeros: the same in all processes."""
        return rendered.replace(self._nonce, "0" * len(self._nonce))

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Split a rendered text into pieces (text, whether it came from a sentinel)."""
        out: list[tuple[str, bool]] = []
        done = 0
        for match in self._sentinel.finditer(rendered):
            digits = match.group(1)
            points = [int(digits[i : i + _DIGITS]) for i in range(0, len(digits), _DIGITS)]
            if max(points) > sys.maxunicode:  # a template cut the sentinel
                continue
            out.append((rendered[done : match.start()], False))
            text = "".join(map(chr, points))
            in_json = rendered[match.start()] == "\\"
            out.append((json.dumps(text)[1:-1] if in_json else text, True))
            done = match.end()
        out.append((rendered[done:], False))
        return out

    def _replace(self, text: str, finder: _Finder) -> str:
        if self._normalize is not None:
            sound = text.encode("utf-8", "replace").decode()
            if self._normal.search(self._normalize(sound)):
                return self._sentinel_of(text)
        if finder.edge.search(text) is None:
            return text
        head, tail = finder.cut(text)
        if not head and not tail and finder.pattern.search(text) is None:
            return text
        body = text[head : len(text) - tail]
        return (
            self._sentinel_of(text[:head])
            + finder.pattern.sub(lambda match: self._sentinel_of(match.group()), body)
            + self._sentinel_of(text[len(text) - tail :])
        )

    def _sentinel_of(self, text: str) -> str:
        if not text:
            return ""
        return f"{OPEN}{self._nonce}{''.join(f'{ord(c):0{_DIGITS}d}' for c in text)}{CLOSE}"


class _Finder:
    """Finds control tokens in a text, and parts of them at its ends.

    Templates concatenate strings, so the text next to a string may complete a token. Therefore two
    or more characters of a token at an end count as the token. One character would be too common,
    and if two strings form a token of three or more characters, one of them has at least two of
    these.
    """

    def __init__(self, texts: set[str]):
        self.pattern = any_of(texts)
        self._longest = max(map(len, texts), default=0)
        self._heads = {text[i:] for text in texts for i in range(1, len(text) - 1)}
        self._tails = {text[:i] for text in texts for i in range(2, len(text))}
        edges = "".join(sorted({text[0] for text in texts} | {text[-1] for text in texts}))
        self.edge = re.compile(f"[{re.escape(edges)}]" if edges else "(?!)")
        self._last = {text[-1] for text in texts}
        self._first = {text[0] for text in texts}

    def cut(self, text: str) -> tuple[int, int]:
        """Return how many characters at a text's start and end may belong to a control token."""
        near = text[: self._longest]
        head = 0
        for char in self._last:
            at = near.find(char)
            while at >= 0:
                if near[: at + 1] in self._heads:
                    head = max(head, at + 1)
                at = near.find(char, at + 1)
        far = text[max(head, len(text) - self._longest) :]
        tail = 0
        for char in self._first:
            at = far.find(char)
            while at >= 0:
                if far[at:] in self._tails:
                    tail = max(tail, len(far) - at)
                at = far.find(char, at + 1)
        return head, tail


# -- encoding ----------------------------------------------------------------------------------


class Codec:
    """Encodes rendered text, in which `Escape` has put sentinels for control tokens. Thread-safe.

    `direct`: the Rust tokenizer is called directly. Otherwise the transformers object is called,
    because its class changes the text or has no Rust tokenizer.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        added: Sequence[Added],
        controls: Sequence[Added],
        escape: Escape,
    ):
        self._tokenizer = tokenizer
        self._escape = escape
        backend = backend_of(tokenizer)
        texts = [*_PROBES, *(f"a {token.text} b\n{token.text}1" for token in controls[:16])]
        self._backend = backend if backend is not None and self._agrees(backend, texts) else None
        self.direct = self._backend is not None
        self._plain = _Plain.of(self._backend, added, controls, texts) if self.direct else None

    def encode(self, text: str) -> Tokens:
        """Return the token ids of a rendered text. Raises BadRequest if it is not valid Unicode."""
        with _unicode_only(text, "messages"):
            return token_ids(self._encode(text))

    def exceeds(self, text: str, most: int) -> bool:
        """Return whether a text has far more than `most` tokens.

        A long text is encoded in pieces, because all of it could take gigabytes of memory. Each cut
        adds a few tokens, so only more than 1.1 * `most` count.
        """
        piece = max(_CHARS_PER_TOKEN * most, _LEAST_PIECE)
        if len(text) <= piece:
            return False
        left = most + most // 10
        for start in range(0, len(text), piece):
            left -= len(self.encode(text[start : start + piece]))
            if left < 0:
                return True
        return False

    def encode_raw(self, text: str) -> Tokens:
        """Return the ids of a plain text, with the tokens that the tokenizer adds at its ends.

        Raises BadRequest if it is not valid Unicode.
        """
        bos = getattr(self._tokenizer, "bos_token", None)
        add = not (bos and text.startswith(bos))
        with _unicode_only(text, "prompt"):
            return token_ids(self._tokenizer.encode(text, add_special_tokens=add))

    def _encode(self, text: str) -> Any:
        if not self._escape.has_sentinel(text):
            return self._encode_plain(text)
        pieces = self._escape.split(text)
        return self._encode_cut(pieces) if self._plain is None else self._plain.encode(pieces)

    def _encode_plain(self, text: str) -> Any:
        if self._backend is not None:
            return _ids(self._backend, text)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _encode_cut(self, pieces: list[tuple[str, bool]]) -> list[int]:
        ids: list[int] = []
        run = ""
        for text, escaped in pieces:
            if not escaped:
                run += text
                continue
            ids += self._encode_plain(run + text[:1])
            run = text[1:]
        return ids + list(self._encode_plain(run))

    def _agrees(self, backend: Any, texts: Sequence[str]) -> bool:
        # The transformers object is called first: that resets truncation and padding of the file.
        return all(
            list(self._tokenizer.encode(text, add_special_tokens=False)) == _ids(backend, text)
            for text in texts
        )


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Encode as a batch of one: `encode` would hold the interpreter's lock."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


@contextmanager
def _unicode_only(text: str, param: str) -> Iterator[None]:
    """Convert a tokenizer's error for a lone surrogate in `text` to BadRequest."""
    try:
        yield
    except (TypeError, UnicodeError):
        if any("\ud800" <= char <= "\udfff" for char in text):
            message = "text is not valid Unicode: it holds half of a surrogate pair"
            raise BadRequest(message, param=param) from None
        raise


class _Plain:
    """A second Rust tokenizer with the same vocabulary, in which control tokens have private names.

    A text gets the same ids as from the first tokenizer if its real control tokens are renamed. The
    original name of a control token is then ordinary text. Both tokenizers share one model of the
    library `tokenizers`, such as BPE; it is copied only if its vocabulary itself converts the text
    of a control token to its id.
    """

    def __init__(self, tokenizer: Any, table: npt.NDArray[np.int32], names: dict[str, str]):
        self._tokenizer = tokenizer
        self._table = table
        self._names = names
        self._pattern = any_of(names)

    @classmethod
    def of(
        cls, backend: Any, added: Sequence[Added], controls: Sequence[Added], texts: Sequence[str]
    ) -> _Plain | None:
        nonce = f"{secrets.randbelow(10**20):020d}"
        names = {token.text: f"<{nonce}{i}>" for i, token in enumerate(controls)}
        for model in (backend.model, None):
            shared = model is not None
            base = _share_model(backend, model) if shared else _copy_model(backend, names)
            if base is None:
                continue
            plain = cls(base, _add_tokens(base, backend, added, names), names)
            if plain._is_correct(backend, controls, texts):
                return plain
        return None

    def encode(self, pieces: list[tuple[str, bool]]) -> Tokens:
        text = "".join(
            piece if escaped else self._pattern.sub(lambda match: self._names[match.group()], piece)
            for piece, escaped in pieces
        )
        return token_ids(self._table[token_ids(_ids(self._tokenizer, text))])

    def _is_correct(self, backend: Any, controls: Sequence[Added], texts: Sequence[str]) -> bool:
        if any(self.encode([(text, False)]).tolist() != _ids(backend, text) for text in texts):
            return False
        joined = "".join(f" {token.text}\n{token.text}" for token in controls)
        ids = self.encode([(joined, True)])
        return not np.isin(ids, [token.id for token in controls]).any()


def _copy_model(backend: Any, names: dict[str, str]) -> Any:
    """Return a copy of `backend` with control tokens renamed, or None if merges have them."""
    spec = json.loads(backend.to_str())
    spec["added_tokens"] = []
    spec["post_processor"] = spec["truncation"] = spec["padding"] = None
    vocabulary = spec["model"].get("vocab")
    if isinstance(vocabulary, list):
        spec["model"]["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    elif isinstance(vocabulary, dict):
        merges = spec["model"].get("merges") or ()
        if any(names.keys() & {*merge, "".join(merge)} for merge in merges):
            return None
        spec["model"]["vocab"] = {names.get(text, text): i for text, i in vocabulary.items()}
    return Tokenizer.from_str(json.dumps(spec))


def _share_model(backend: Any, model: Any) -> Any:
    base = Tokenizer(model)
    if backend.normalizer is not None:
        base.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        base.pre_tokenizer = backend.pre_tokenizer
    return base


def _add_tokens(
    base: Any, backend: Any, added: Sequence[Added], names: dict[str, str]
) -> npt.NDArray[np.int32]:
    """Add `added` to the new tokenizer `base`, with control tokens renamed.

    Added tokens may get other ids in `base`: element i of the result is the id that `backend` has
    for the token with the id i in `base`.
    """
    taken = base.get_vocab(with_added_tokens=False)
    top = max(taken.values(), default=-1)
    # New ids start at the vocabulary's size: fill its holes, so that no id is used twice.
    base.add_tokens([f"<{secrets.token_hex(10)}>" for _ in range(top + 1 - len(taken))])
    originals = backend.get_added_tokens_decoder()
    table = np.arange(top + 2 + len(added), dtype=np.int32)
    for token in added:
        flags = originals[token.id]
        twin = AddedToken(
            names.get(token.text, token.text),
            single_word=flags.single_word,
            lstrip=flags.lstrip,
            rstrip=flags.rstrip,
            normalized=flags.normalized,
            special=flags.special,
        )
        (base.add_special_tokens if flags.special else base.add_tokens)([twin])
        table[base.token_to_id(twin.content)] = token.id
    return table
