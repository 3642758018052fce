"""A model and its draft model, combined into one model with one list of caches.

Both are fed every token, so their KV is one lineage of one length, and is always kept, committed,
written and restored together.
"""

from __future__ import annotations

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxcache.errors import ModelError
from mlxcache.model import kv
from mlxcache.model.adapters import Sliced, adapter_of, class_name
from mlxcache.model.kv import Caches


class Pair(nn.Module):  # type: ignore[misc]
    def __init__(self, model: nn.Module, draft: nn.Module, vocab_size: int, draft_vocab_size: int):
        super().__init__()
        self.model = model
        self.draft = draft
        self.model_type = getattr(model, "model_type", type(model).__name__)
        self._vocab_size = vocab_size
        self._draft_vocab_size = draft_vocab_size
        self._own = len(make_prompt_cache(model))

    def make_cache(self) -> Caches:
        return [*make_prompt_cache(self.model), *make_prompt_cache(self.draft)]

    def __call__(self, tokens: mx.array, cache: Caches, **inputs: mx.array) -> mx.array:
        """Feed `tokens`, shape (1, n), to both models; return the logits of the model, (1, n, V).

        `inputs`, such as images, are for the model only: of images, the draft model is fed the
        placeholder tokens.
        """
        self._draft(tokens, cache)
        return self.verify(tokens, cache, **inputs)

    def verify(self, tokens: mx.array, cache: Caches, **inputs: mx.array) -> mx.array:
        logits: mx.array = self.model(tokens, cache=cache[: self._own], **inputs)
        return logits

    def propose(self, tokens: mx.array, cache: Caches) -> mx.array:
        """Feed `tokens` to the draft model only; return its logits, as wide as the model's."""
        logits = self._draft(tokens, cache)
        lacking = self._vocab_size - self._draft_vocab_size
        if lacking <= 0:
            return logits[..., : self._vocab_size]
        return mx.pad(logits, [(0, 0), (0, 0), (0, lacking)], constant_values=-mx.inf)

    def _draft(self, tokens: mx.array, cache: Caches) -> mx.array:
        if self._draft_vocab_size < self._vocab_size:
            # padding ids of the model; a CPU reads beyond an embedding table without a check
            tokens = mx.minimum(tokens, self._draft_vocab_size - 1)
        logits: mx.array = self.draft(tokens, cache=cache[self._own :])
        return logits

    def set_draft_length(self, cache: Caches, length: int) -> None:
        slots = kv.flatten(cache[self._own :])
        kv.cut(slots, length)
        for slot in slots:
            adapter = adapter_of(slot)
            if isinstance(adapter, Sliced) and adapter.filled(slot):
                adapter.end_at(slot, length)


def make_pair(model: nn.Module, draft: nn.Module) -> Pair:
    """Combine a model and its draft model. Raises ModelError if a cache cannot be cut anywhere."""
    for name, one in (("model", model), ("draft model", draft)):
        names = unfit(one)
        if names:
            raise ModelError(
                f"--draft-model needs layers that can be cut back at any token to what was "
                f"accepted, but the {name} has {', '.join(names)}. Start without --draft-model."
            )
    return Pair(
        model, draft, *(kv.survey(one, evaluate=False).vocab_size for one in (model, draft))
    )


def unfit(model: nn.Module) -> list[str]:
    found = set()
    for slot in kv.flatten(kv.make_caches(model)):
        adapter = adapter_of(slot)
        if not isinstance(adapter, Sliced) and not (adapter and adapter.cuts):
            why = " (a state of one position)" if adapter is not None else ""
            found.add(class_name(slot) + why)
    return sorted(found)


def check_tokenizers(tokenizer: TokenizerWrapper, draft: TokenizerWrapper) -> None:
    """Raise ModelError unless both vocabularies have the same tokens with the same ids."""
    mine, theirs = tokenizer.get_vocab(), draft.get_vocab()
    if mine == theirs:
        return
    other = min(mine.items() ^ theirs.items(), key=lambda entry: (entry[1], entry[0]))
    raise ModelError(
        f"The draft model has another tokenizer: {len(theirs)} tokens, where the model has "
        f"{len(mine)}; the first that differs is {other[0]!r}. --draft-model takes a model of the "
        "same family."
    )
