"""Encoding of rendered text to token ids; escaped text never becomes a control token."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer

from mlxcache.errors import BadRequest
from mlxcache.prompt.escape import Escape
from mlxcache.prompt.tokenizer import Added, ChatTokenizer, any_of, backend_of
from mlxcache.types import Tokens, token_ids

_PROBES = (
    "plain words, twice  spaced\n\n\tand indented\n",
    "don't 1234567 x=3.14; naïve café \u65e5\u672c\u8a9e \U0001f980e\u0301",
    " leading and trailing ",
)


_LEAST_PIECE = 1 << 16
"""Fewest characters per piece in which the tokens of a long text are counted."""
_CHARS_PER_TOKEN = 8
"""Characters of such a piece for each token of the limit, if that is more than `_LEAST_PIECE`."""


class Codec:
    """Encodes rendered text, in which `escape` has put sentinels for control tokens. Thread-safe.

    `added`: the added tokens of `tokenizer`. `controls`: those that are control tokens.

    Attribute `direct`: the Rust tokenizer is called directly. Otherwise the transformers object is
    called, because its class changes the text or has no Rust tokenizer.
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
        self._plain = None
        if self.direct:
            self._plain = _Plain.of(self._backend, added, controls, texts)

    def encode(self, text: str) -> Tokens:
        """Return the token ids of a rendered text, shape (n,), without tokens added at its ends.

        Raises BadRequest if the text is not valid Unicode (contains a lone surrogate).
        """
        with _unicode_only(text, "messages"):
            return token_ids(self._encode(text))

    def exceeds(self, text: str, most: int) -> bool:
        """Return whether a text has far more than `most` tokens.

        Returns False, without encoding the text, if it has at most 8 * `most` or at most 65536
        characters. A longer one is encoded in pieces, because encoding all of it at once could take
        gigabytes of memory. Each cut between pieces adds a few tokens, so the result is True only
        if the pieces have more than 1.1 * `most` tokens together. Raises BadRequest as `encode`.
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

        None are added if the text already begins with the first of them. Raises BadRequest if the
        text is not valid Unicode.
        """
        bos = getattr(self._tokenizer, "bos_token", None)
        add = not (bos and text.startswith(bos))
        with _unicode_only(text, "prompt"):
            ids = self._tokenizer.encode(text, add_special_tokens=add)
            return token_ids(ids)

    def _encode(self, text: str) -> Any:
        if not self._escape.has_sentinel(text):
            return self._encode_plain(text)
        pieces = self._escape.split(text)
        if self._plain is not None:
            return self._plain.encode(pieces)
        return self._encode_cut(pieces)

    def _encode_plain(self, text: str) -> Any:
        if self._backend is not None:
            return _ids(self._backend, text)
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _encode_cut(self, pieces: list[tuple[str, bool]]) -> list[int]:
        """Return the token ids of (text, escaped) pieces; escaped text matches no control token.

        `escaped`: the text came from a sentinel. The joined text of all pieces is cut after the
        first character of each escaped text, and the parts are encoded separately.
        """
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
        """Return whether two tokenizers give the same ids for each of `texts`.

        They are `backend`, written in Rust, and the transformers object that it was taken from.
        """
        # The transformers object is called first: that resets truncation and padding of the file.
        return all(
            list(self._tokenizer.encode(text, add_special_tokens=False)) == _ids(backend, text)
            for text in texts
        )


def _ids(tokenizer: Any, text: str) -> list[int]:
    """Encode a text to token ids with a Rust tokenizer, as a batch of one.

    The tokenizer's method `encode` would hold the interpreter's lock and block all other requests.
    """
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


@contextmanager
def _unicode_only(text: str, param: str) -> Iterator[None]:
    """Context manager: convert a tokenizer's error for a lone surrogate in `text` to BadRequest.

    `param`: the field of the request that holds the text, for the error.
    """
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
        """Make a tokenizer in which control tokens are renamed, or return None if impossible.

        It must give the same ids for `texts` as `backend`, the original Rust tokenizer, and never
        the id of a control token for the token's text. `added`: added tokens of `backend`.
        `controls`: those that are control tokens.
        """
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
        """Return the ids that the original tokenizer has for (text, escaped) pieces, shape (n,).

        Control tokens are recognised only in pieces that are not escaped.
        """
        text = "".join(
            piece if escaped else self._pattern.sub(self._name, piece) for piece, escaped in pieces
        )
        ids = _ids(self._tokenizer, text)
        return token_ids(self._table[token_ids(ids)])

    def _name(self, match: re.Match[str]) -> str:
        return self._names[match.group()]

    def _is_correct(self, backend: Any, controls: Sequence[Added], texts: Sequence[str]) -> bool:
        """Return whether `texts` get the ids of `backend`, and escaped text no id of `controls`."""
        same = all(self.encode([(text, False)]).tolist() == _ids(backend, text) for text in texts)
        if not same:
            return False
        joined = "".join(f" {token.text}\n{token.text}" for token in controls)
        ids = self.encode([(joined, True)])
        return not np.isin(ids, [token.id for token in controls]).any()


def _share_model(backend: Any, model: Any) -> Any:
    """Return a Rust tokenizer over `model` itself, without added tokens.

    `model`: the `tokenizers` model of the Rust tokenizer `backend`.
    """
    base = Tokenizer(model)
    _copy_stages(base, backend)
    return base


def _copy_model(backend: Any, names: dict[str, str]) -> Any:
    """Return a copy of the Rust tokenizer `backend` in whose vocabulary control tokens are renamed.

    `names` maps the texts of control tokens to the new ones. The copy has no added tokens. Returns
    None if a merge of its BPE model contains a control token.
    """
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


def _copy_stages(base: Any, backend: Any) -> None:
    """Give the Rust tokenizer `base` the normalizer and the pre-tokenizer of `backend`."""
    if backend.normalizer is not None:
        base.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        base.pre_tokenizer = backend.pre_tokenizer


def _add_tokens(
    base: Any, backend: Any, added: Sequence[Added], names: dict[str, str]
) -> npt.NDArray[np.int32]:
    """Add the tokens `added` to the new tokenizer `base`, with control tokens renamed.

    `backend`: the original tokenizer, which has the tokens `added`. `names`: the new text of each
    control token, by its text in `backend`. Both are Rust tokenizers. Their vocabularies have the
    same ids, but added tokens may get other ids in `base`. Returns an int32 array that converts the
    ids of `base`: element i is the id that `backend` has for the token with the id i in `base`.
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
