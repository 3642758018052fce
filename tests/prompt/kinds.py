"""Tokenizers of many kinds, small ones, built on the spot."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

CONTROL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
)
"""Every special token that a template of `templates` writes."""

MARKS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)

TEXT = [
    "The quick brown fox jumps over the lazy dog. It's what they'd say, isn't it?\n",
    "def main(path: str) -> int:\n    for i in range(10):\n\treturn i + 12345  # x <b>y</b>\n",
    "user assistant system tool model [1, 2, 3] {'a': 'b'} \"name\": \"value\" 2024-05-06\n",
    "naïve café 日本語の文章 русский 🦀\n",
] * 4


class Wrapped:
    """A transformers tokenizer as mlx-lm wraps it: all that the prompt layer may use."""

    def __init__(self, inner: Any):
        self._tokenizer = inner
        thinks = "<think>" in inner.get_vocab()
        self.think_start = "<think>" if thinks else None
        self.think_end = "</think>" if thinks else None
        self.has_thinking = thinks
        self.has_chat_template = inner.chat_template is not None

    def apply_chat_template(self, messages: Any, /, **kwargs: Any) -> Any:
        return self._tokenizer.apply_chat_template(messages, return_dict=False, **kwargs)

    def get_added_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.get_added_vocab())

    def encode(self, text: str, /, **kwargs: Any) -> list[int]:
        return list(self._tokenizer.encode(text, **kwargs))

    @property
    def bos_token(self) -> str | None:
        return self._tokenizer.bos_token


class NoBackend:
    """A tokenizer object without a Rust tokenizer to be seen."""

    def __init__(self, inner: Any):
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name in ("backend_tokenizer", "_tokenizer"):
            raise AttributeError(name)
        return getattr(self._inner, name)


class Newlines(PreTrainedTokenizerFast):
    def encode(self, text: str, **kwargs: Any) -> list[int]:
        return list(super().encode(text.replace("\n", "<n>"), **kwargs))


def _controls(**flags: Any) -> list[AddedToken]:
    flags = {"normalized": False, **flags}
    return [AddedToken(text, special=True, **flags) for text in CONTROL]


def _train(tokenizer: Tokenizer, trainer: Any, **flags: Any) -> Tokenizer:
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(_controls(**flags))
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    return tokenizer


def byte_level(**flags: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    return _train(tokenizer, trainer, **flags)


def byte_level_prefixed() -> Tokenizer:
    """A blank is put before each piece that has none."""
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def digits_in_threes() -> Tokenizer:
    """Split by an expression first, digits in threes, a line's end with what follows."""
    pattern = (
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def normalized_nfc() -> Tokenizer:
    """Composes characters first; its special tokens are found in the raw text."""
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def normalized_specials() -> Tokenizer:
    """Special tokens are found in the normalised text, where case is folded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    return _train(tokenizer, trainer, normalized=True)


def blank_runs() -> Tokenizer:
    """Runs of blanks and an HTML tag are added tokens, and not special."""
    tokenizer = byte_level()
    runs = [" " * n for n in range(2, 17)] + ["\n" * n for n in range(2, 5)]
    tokenizer.add_tokens([AddedToken(run, normalized=True, special=False) for run in runs])
    tokenizer.add_tokens([AddedToken("<b>", normalized=False, special=False)])
    return tokenizer


def one_in_another() -> Tokenizer:
    """Special tokens that begin, end or contain others."""
    tokenizer = byte_level()
    longer = ("<|im_end|>\n", "<|im_end|><|im_start|>", "<|im", "[INST][/INST]", "<<s>", "<s>>")
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in longer])
    return tokenizer


def gaps() -> Tokenizer:
    """Special tokens are in the vocabulary, whose ids leave some numbers out."""
    tokenizer = byte_level()
    spec = json.loads(tokenizer.to_str())
    words = sorted(spec["model"]["vocab"].items(), key=lambda item: item[1])
    words = [word for word, _ in words if word not in (*CONTROL, *MARKS)]
    order = [*words[:-40], *CONTROL, *MARKS]
    ids = {text: i for i, text in enumerate(order)}
    ids |= {text: len(order) + 10 + i for i, text in enumerate(words[-40:])}
    spec["model"]["vocab"] = ids
    spec["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.add_special_tokens(_controls())
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    return tokenizer


def single_words() -> Tokenizer:
    """Special tokens count only with no word beside them."""
    return byte_level(single_word=True)


def sentencepiece(scheme: str, **flags: Any) -> Tokenizer:
    """BPE over blanks written as a low line, with bytes for what it does not know."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=500, show_progress=False, special_tokens=["<unk>"])
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer = _with_bytes(tokenizer)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(_controls(**flags))
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    return tokenizer


def _with_bytes(tokenizer: Tokenizer) -> Tokenizer:
    """The same with byte fallback, and with the special tokens' texts in the vocabulary too."""
    spec = json.loads(tokenizer.to_str())
    vocabulary = spec["model"]["vocab"]
    for text in (*(f"<0x{i:02X}>" for i in range(256)), "<s>", "</s>", "[INST]"):
        vocabulary.setdefault(text, len(vocabulary))
    spec["model"]["byte_fallback"] = True
    return Tokenizer.from_str(json.dumps(spec))


def replacing() -> Tokenizer:
    """Blanks are replaced by a normaliser; nothing marks a text's start."""
    tokenizer = sentencepiece("never")
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def prepending() -> Tokenizer:
    """A normaliser puts a mark before every piece, and there is no pre-tokeniser."""
    spec = json.loads(replacing().to_str())
    spec["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """A unigram model whose vocabulary holds the special tokens and would choose them."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=400, show_progress=False, special_tokens=["<unk>"], unk_token="<unk>"
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = []
    spec["model"]["vocab"] += [[text, 0.0] for text in CONTROL]
    spec["model"]["vocab"] += [[f"<0x{i:02X}>", -20.0] for i in range(256)]
    spec["model"]["byte_fallback"] = True
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first"), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(_controls())
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in MARKS])
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_level_prefixed": byte_level_prefixed,
    "digits_in_threes": digits_in_threes,
    "normalized_nfc": normalized_nfc,
    "normalized_specials": normalized_specials,
    "blank_runs": blank_runs,
    "one_in_another": one_in_another,
    "gaps": gaps,
    "single_words": single_words,
    "left_stripping": lambda: byte_level(lstrip=True),
    "right_stripping": lambda: byte_level(rstrip=True),
    "metaspace_always": lambda: sentencepiece("always"),
    "metaspace_first": lambda: sentencepiece("first"),
    "metaspace_right_stripping": lambda: sentencepiece("always", rstrip=True),
    "replacing": replacing,
    "prepending": prepending,
    "unigram": unigram,
}

INCREMENTAL = [kind for kind in KINDS if kind not in ("normalized_specials", "single_words")]
"""Those that can begin at a special token; the others find it by what stands around it."""


@lru_cache(maxsize=32)
def backend(kind: str) -> Tokenizer:
    """The Rust tokenizer of a kind, built once; treat it as immutable."""
    return KINDS[kind]()


def tokenizer(kind: str, template: str | None, *, cls: Any = PreTrainedTokenizerFast) -> Wrapped:
    bos = "<|begin_of_text|>" if template and "header" in template else "<s>"
    inner = cls(tokenizer_object=backend(kind), bos_token=bos, eos_token="</s>")
    inner.chat_template = template
    return Wrapped(inner)
