"""A byte-level BPE tokenizer for models made on the spot.

It is trained on text that any Python installation has: the language reference behind `help()`, and
the standard library's own sources.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from pydoc_data import topics

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from mlxcache.model.demo import END_OF_TEXT, TURN_END, TURN_START

CONTROL = (END_OF_TEXT, TURN_START, TURN_END)
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINK_MARKS = ("<think>", "</think>")


def reference_texts() -> Iterator[str]:
    """The Python language reference by topic: about 450 KB of English."""
    for name in sorted(topics.topics):
        yield topics.topics[name]


def library_sources(*, packages: bool = False) -> Iterator[str]:
    """The source text of the standard library: its modules, 4.5 MB; with `packages` 30 MB."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("**/*.py" if packages else "*.py")):
        if "site-packages" not in path.parts:
            yield path.read_text(encoding="utf-8", errors="replace")


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, thinking: bool) -> Tokenizer:
    """A byte-level BPE over `texts`, of at most `vocab_size` tokens with the special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = MARKS + (THINK_MARKS if thinking else ())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(marks),
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in marks])
    return tokenizer


@lru_cache(maxsize=8)
def toy_tokenizer(vocab_size: int, thinking: bool) -> str:
    """The tokenizer.json of a toy; larger vocabularies also learn from sources.

    Takes seconds, and half a minute for one of more than 65,536 tokens.
    """
    texts = list(reference_texts())
    if vocab_size > 8192:
        texts += library_sources(packages=vocab_size > 65536)
    return train_tokenizer(texts, vocab_size, thinking=thinking).to_str()
