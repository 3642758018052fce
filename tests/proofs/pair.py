"""A server of two models, and conversations with them: what the proofs of several models share."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxcache.bench.client import Client, Refused, Reply
from mlxcache.bench.process import Launch
from mlxcache.bench.turns import Filler
from tests.proofs import models
from tests.soak.reference import TOLERANCE, Reference

NEW = 64
"""Most tokens that a warm turn feeds besides its new ones."""

WAIT_S, POLL_S = 60.0, 0.001
"""Longest wait for a line of a server's log, and the interval at which its file is read."""

CHUNK = 512
"""Tokens that the reference computes at once."""

EXPERT_BYTES = 4 * 3 * 256 * 320 * 4
"""Bytes of one expert in all layers of a model that `make_pair` makes."""


def make_pair(
    folder: Path, families: Sequence[str], weights_bytes: int, kv_heads: int = 2
) -> dict[str, Path]:
    """Write models of about `weights_bytes` each into `folder`; return their folders by name.

    `families`: one for each of "one" and "two", with experts. A token uses two of many experts, so
    that a pass takes little time compared with reading the weights, as on a GPU.
    """
    experts = {"num_experts": weights_bytes // EXPERT_BYTES, "moe_intermediate_size": 320}
    return {
        name: models.of_experts(folder / name, family, seed, kv_heads, experts)
        for seed, (name, family) in enumerate(zip(("one", "two"), families, strict=True))
    }


def weights_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def launch_of(paths: Mapping[str, Path], folder: Path, *flags: str) -> Launch:
    """Return how to start a server of several models, with its cache and config in `folder`."""
    config = folder / "config.toml"
    tables = [f'[models.{name}]\npath = "{path}"\n' for name, path in paths.items()]
    config.write_text("\n".join(tables), encoding="utf-8")
    command = (sys.executable, "-m", "mlxcache.cli.main", "serve", "--config", str(config))
    where = ("--port", "{port}", "--cache-dir", str(folder / "cache"), "--log-level", "info")
    return Launch("pair", command + where + flags)


class NotReached(Exception):
    """Error raised if a server does not come to the state that a proof needs."""


class Log:
    """What the server on `port` prints into its file in `folder`, as `running` names it."""

    def __init__(self, folder: Path, port: int):
        self._path = folder / f"pair-{port}.log"

    @property
    def text(self) -> str:
        return self._path.read_text(encoding="utf-8", errors="replace")

    def count(self, words: str) -> int:
        return self.text.count(words)

    def wait(self, words: str, times: int, seconds: float = WAIT_S) -> None:
        """Wait until `words` were printed `times` times. Raises NotReached after `seconds`."""
        end = time.monotonic() + seconds
        while self.count(words) < times:
            if time.monotonic() > end:
                raise NotReached(f"no {words!r} in {self._path}")
            time.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class Said:
    """A turn: its messages, the reply, and the prompt's tokens as the server counted them."""

    messages: Sequence[Mapping[str, Any]]
    reply: str
    prompt_tokens: int


@dataclass(slots=True)
class Conversation:
    """A conversation with the model `model`, which sends an unanswered turn again.

    `tokens`: tokens of the turns that were answered, whose KV was computed. `said`: all of them.
    """

    model: str
    filler: Filler
    name: str
    tokens: int = 0
    session: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)

    def ask(self, client: Client, tokens: int, reply_tokens: int) -> Reply:
        """Send a message of `tokens` tokens, or the last one again. Blocks. Raises Refused.

        A reply without its counts, which come last, was cut off, and is not noted.
        """
        if len(self.messages) % 2 == 0:
            text = self.filler.text(tokens, f"{self.name}/{len(self.said)}")
            self.messages.append({"role": "user", "content": text})
        own = Client(client.port, self.model, client.timeout)
        reply = own.chat(self.messages, reply_tokens)
        if reply.prompt_tokens is None:
            raise Refused(0, "the connection ended within a reply")
        self.said.append(Said(tuple(self.messages), reply.text, reply.prompt_tokens))
        self.messages.append({"role": "assistant", "content": reply.text})
        self.tokens = reply.conversation_tokens
        return reply

    def note_session(self, client: Client, reply: Reply) -> None:
        """Note the session to which the server has written a turn. Raises Refused."""
        self.session = client.get(f"/v1/requests/{reply.request}")["session"]


def excess(reply: Reply, known: int) -> int:
    """Return by how many tokens a turn fed more than those behind its first `known` ones."""
    return (reply.fed_tokens or 0) - ((reply.prompt_tokens or 0) - known)


def wrong_texts(paths: Mapping[str, Path], talks: Sequence[Conversation]) -> list[str]:
    """Compare all replies with mlx-lm, one model in memory at a time; violations, as sentences.

    A conversation is computed in one go, because each prompt continues the turn before it.
    """
    wrong = []
    for name, path in paths.items():
        reference = Reference(path)
        for talk in (one for one in talks if one.model == name and one.said):
            wrong += [f"{talk.name}: {found}" for found in _wrong_replies(reference, talk.said)]
    return wrong


def _wrong_replies(reference: Reference, turns: Sequence[Said]) -> list[str]:
    last = turns[-1]
    ids = reference.prompt(last.messages) + reference.tokens(last.reply)
    short = reference.shortfalls(ids, CHUNK)
    wrong = []
    for said in turns:
        prompt, out = reference.prompt(said.messages), reference.tokens(said.reply)
        end = len(prompt) + len(out)
        if ids[:end] != prompt + out:
            wrong.append(f"a turn of {len(prompt)} tokens is not a part of the last one")
        elif said.prompt_tokens != len(prompt):
            wrong.append(f"a prompt of {len(prompt)} tokens was counted as {said.prompt_tokens}")
        elif (worst := short[len(prompt) - 1 : end - 1].max(initial=0.0)) > TOLERANCE:
            wrong.append(f"a reply to {len(prompt)} tokens is not the likeliest, by {worst:.4f}")
    return wrong
