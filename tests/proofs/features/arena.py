"""Models whose servers are played against, and the search for a failure's simplest form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxcache.model import demo
from tests.proofs.features.plan import Conversation
from tests.proofs.features.play import Pair
from tests.proofs.features.servers import Host, Inside, Outside
from tests.toys.toy import make_toy

ATTEMPTS = 80
"""Most simpler forms of a conversation that are played."""


@dataclass(frozen=True, slots=True)
class Model:
    """A toy of a family, or the demo; `settings` of its server that caches."""

    family: str | None
    thinks: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def make(self, folder: Path) -> Path:
        """Write the model, which now and then ends its turns, its thoughts and its strings."""
        if self.family is None:
            return demo.materialise(folder)
        emits = {"<|im_end|>": 30, '"': 8} | ({"</think>": 12} if self.thinks else {})
        return make_toy(folder, self.family, thinking=self.thinks, emits=emits)


MODELS: Mapping[str, Model] = {
    "demo": Model(None),
    "llama+thinking": Model("llama", thinks=True),
    "gemma3": Model("gemma3", settings={"prefill_chunk": 64}),
    "qwen3_5+thinking": Model("qwen3_5", thinks=True),
    "mamba2": Model("mamba2", settings={"prefill_chunk": 64}),
    "gpt_oss": Model("gpt_oss", settings={"speculate": "auto"}),
    "gemma4": Model("gemma4", settings={"prefill_chunk": 64, "speculate": "auto"}),
    "cohere2": Model("cohere2", settings={"prefill_chunk": 64}),
    "olmo3": Model("olmo3"),
    "llama": Model("llama", settings={"speculate": "auto"}),
    "qwen3_5": Model("qwen3_5", settings={"speculate": "auto"}),
}


@contextmanager
def opened(name: str, folder: Path, *, outside: bool = False) -> Iterator[Pair]:
    """Start the two servers of a model, in this process or `outside` of it, and end them.

    `name`: one of `MODELS`, or a family of toys.
    """
    model = MODELS.get(name) or Model(name)
    path = folder / "model"
    path = path if (path / "config.json").exists() else model.make(path)

    def host(kind: str, disk: str, settings: Mapping[str, Any]) -> Host:
        if not outside:
            return Inside(path, folder / kind, disk=disk, **settings)
        flags = [
            f"--{key.replace('_', '-')}" + ("" if value is True else f"={value}")
            for key, value in settings.items()
        ]
        return Outside(path, folder / kind, "--ram", "300MB", "--disk", disk, *flags)

    cold = host("cold", "off", {"no_anticipate": True})
    pair = Pair(name, path, host("warm", "200MB", model.settings), cold, thinks=model.thinks)
    try:
        yield pair
    finally:
        pair.close()


def simplest(
    conversation: Conversation, fails: Callable[[Conversation], bool], attempts: int = ATTEMPTS
) -> Conversation:
    """Drop steps and features of a conversation one at a time, as long as it fails without."""
    found = True
    while found:
        found = False
        for simpler in conversation.simpler():
            attempts -= 1
            if attempts < 0:
                return conversation
            if fails(simpler):
                conversation, found = simpler, True
                break
    return conversation
