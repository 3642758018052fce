"""A trace played to a server as token ids, so that its lengths are exact to the token."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from urllib.request import Request as HttpRequest
from urllib.request import urlopen

import numpy as np
from tokenizers import Tokenizer

from mlxcache.plan.trace import Request


class IdsPlayer:
    """Player to the server at `url`, of a toy model in `folder`."""

    def __init__(self, url: str, folder: Path):
        self.prompt_tokens = self.cached_tokens = 0
        self._url = url
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._said: dict[int, list[int]] = {}
        # part of a character before a reply would change the reply's text
        vocabulary = self._tokenizer.get_vocab()
        self._plain = sorted(id for token, id in vocabulary.items() if token.isascii())[64:]

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that the server reused."""
        return self.cached_tokens / self.prompt_tokens

    def play(self, requests: Iterable[Request]) -> None:
        """Send requests one after another, each with what the server replied before.

        Replies are random: greedy ones repeat themselves, and the server ends those.
        """
        for one in requests:
            prompt = slice(one.prompt_parts)
            pairs = zip(one.ids[prompt].tolist(), one.lengths[prompt].tolist(), strict=True)
            ids = [token for id, count in pairs for token in self._tokens(id, count)]
            assert len(ids) == one.prompt_tokens
            body = {"model": "toy", "prompt": ids, "max_tokens": max(1, one.reply_tokens)}
            headers = {"Content-Type": "application/json"}
            if one.session is not None:
                headers["X-Session-Id"] = one.session
            data = json.dumps(body | {"temperature": 1.0, "top_k": 12, "seed": 1}).encode()
            with urlopen(HttpRequest(f"{self._url}/v1/completions", data, headers)) as response:
                answer = json.load(response)
            usage = answer["usage"]
            self.prompt_tokens += usage["prompt_tokens"]
            self.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
            text = answer["choices"][0]["text"]
            for id in one.ids[one.prompt_parts :].tolist():
                self._said[id] = self._tokenizer.encode(text, add_special_tokens=False).ids

    def _tokens(self, id: int, count: int) -> list[int]:
        said = self._said.get(id)
        if said is not None:
            assert len(said) == count, "the toy's reply does not encode to the generated tokens"
            return said
        rng = np.random.default_rng(id)
        return [self._plain[at] for at in rng.integers(0, len(self._plain), count)]
