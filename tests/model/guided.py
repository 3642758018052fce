"""Replies of a model that knows nothing, under a grammar: vocabularies and a random decoder."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EOS = "<|endoftext|>"
VOCABULARIES = ("bytes", "pieces", "large")
CLOSING = frozenset('"}])>')

SAMPLE = [
    '{"name": "value", "count": 12, "list": [1, 2.5, null, true, false], "text": "a b c"}\n',
    "The quick brown fox jumps over the lazy dog, doesn't it? naïve café 日本語 🦀\n",
    "<tool_call>\n<function=look>\n<parameter=city>\nAix\n</parameter>\n</function>\n</tool_call>",
] * 4


def inner(kind: str, special: Sequence[str] = ()) -> Tokenizer:
    found = Tokenizer.from_str(_plain(kind))
    tokens = [AddedToken(token, special=True, normalized=False) for token in (EOS, *special)]
    found.add_special_tokens(tokens)
    return found


@lru_cache
def _plain(kind: str) -> str:
    if kind == "pieces":
        return _pieces().to_str()
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    if kind == "large":
        vocabulary += _many(120_000, set(vocabulary))
        found = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, []))
    else:
        found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    if kind == "bytes":
        trainer = trainers.BpeTrainer(
            vocab_size=500, initial_alphabet=vocabulary, show_progress=False
        )
        found.train_from_iterator(SAMPLE, trainer)
    return found.to_str()


def _pieces() -> Tokenizer:
    """As sentencepiece: blanks are `▁`, unknown characters are bytes."""
    found = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=[*string.printable.strip(), "▁"],
        show_progress=False,
    )
    found.train_from_iterator(SAMPLE, trainer)
    body = json.loads(found.to_str())
    for token in body["added_tokens"]:
        token["special"] = token["content"] == "<unk>"
    body["added_tokens"] = [token for token in body["added_tokens"] if token["special"]]
    return Tokenizer.from_str(json.dumps(body))


def _many(count: int, taken: set[str]) -> list[str]:
    """Words, numbers and punctuation in the byte-level alphabet, as large vocabularies have."""
    draw = random.Random(1)
    marks = [
        '"',
        '":',
        '",',
        "{",
        '{"',
        "}",
        "}}",
        "]",
        "[",
        '"}',
        "</",
        ">",
        "Ġ",
        "Ċ",
        "ĊĠĠ",
        '\\"',
    ]
    found: dict[str, None] = {}
    while len(found) < count:
        word = "".join(draw.choices(string.ascii_letters + string.digits, k=draw.randint(1, 8)))
        word = (
            draw.choice(["", "Ġ", draw.choice(marks)])
            + word
            + draw.choice(["", draw.choice(marks)])
        )
        if word not in taken:
            found[word] = None
    return list(found)


class Writer:
    """Writes replies with random tokens that a grammar allows, and prefers those that close.

    `tokenizer` is the transformers tokenizer whose vocabulary it writes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self.eos = int(tokenizer.convert_tokens_to_ids(EOS))
        self.tokenizer: LLTokenizer = from_tokenizer(tokenizer, eos_token=self.eos)
        size = self.tokenizer.vocab_size
        texts = [self.tokenizer.decode_bytes([token]) for token in range(size)]
        closing = [bool(text) and all(chr(byte) in CLOSING for byte in text) for text in texts]
        self._closing = np.array(closing)

    def write(self, grammar: str, seed: int, limit: int = 400) -> list[int] | None:
        """Ids of a complete reply, without its end of turn, or None if it reached the limit."""
        matcher = LLMatcher(self.tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        draw = random.Random(seed)
        ids: list[int] = []
        while len(ids) < limit:
            bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, bitorder="little")[: len(self._closing)].astype(bool)
            token = self._pick(allowed, draw, hurry=len(ids) / limit)
            if token == self.eos:
                return ids
            assert matcher.consume_token(token), matcher.get_error()
            ids.append(token)
        return None

    def _pick(self, allowed: np.ndarray, draw: random.Random, hurry: float) -> int:
        if allowed[self.eos] and draw.random() < 0.3 + hurry:
            return self.eos
        if (
            draw.random() < 0.2 + hurry
            and (closing := np.flatnonzero(allowed & self._closing)).size
        ):
            return int(draw.choice(closing))
        choices = np.flatnonzero(allowed)
        assert choices.size, "the grammar allows nothing"
        return int(draw.choice(choices))

    def accepts(self, grammar: str, text: str) -> bool:
        """Tell if a whole reply may be `text`, whose special tokens are read as such."""
        matcher = LLMatcher(self.tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        ids = self.tokenizer.tokenize_str(text, parse_special=True)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode_bytes(list(ids)).decode()


def bare(kind: str, special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=inner(kind, special), eos_token=EOS)


def detokenizer_of(kind: str) -> Any:
    return SPMStreamingDetokenizer if kind == "pieces" else BPEStreamingDetokenizer
