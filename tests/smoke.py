"""Two turns, a restart, and a third turn, with exact counts of cached tokens.

    python -m tests.smoke [--model PATH|HUB_ID]

One server runs all three turns; another one is stopped after the second and started again. The
third turn must reuse the same tokens in both, those of the second all from disk, and get the same
reply. What can be reused at least is computed from the model's own chat template. Prints a line per
turn; exit status 1 if a count is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import snapshot_download
from transformers import AutoTokenizer

from mlxcache.bench.client import Client, Reply
from tests.served import Served, served

DEFAULT_MODEL = "mlx-community/Qwen3-0.6B-4bit"
MAX_TOKENS = 24

RULES = "Answer in one short sentence. " + " ".join(
    f"Rule {n}: name the unit of every figure, and check figure {n} twice." for n in range(1, 25)
)
QUESTIONS = (
    "What is a prompt cache?",
    "Why does one changed word at its beginning matter?",
    "And what does a restart of the server change?",
)

Messages = list[dict[str, str]]


def options(home: Path) -> tuple[str, ...]:
    """Flags of a server whose prompts have no thinking, and which computes nothing unasked."""
    return (
        *("--cache-dir", str(home / "cache"), "--ram", "1GB", "--disk", "2GB"),
        *("--chat-template-args", '{"enable_thinking": false}', "--no-anticipate"),
    )


def ask(server: Served, messages: Messages, question: str) -> Reply:
    """Take one turn, and add it to `messages`."""
    messages.append({"role": "user", "content": question})
    reply = Client(int(urlsplit(server.url).port or 0), "any").chat(messages, MAX_TOKENS)
    messages.append({"role": "assistant", "content": reply.text})
    return reply


def request_of(server: Served, reply: Reply) -> dict[str, Any]:
    """What the server says about a request."""
    found: dict[str, Any] = Client(int(urlsplit(server.url).port or 0), "any").get(
        f"/v1/requests/{reply.request}"
    )
    return found


def least_cached(model: Path, messages: Messages) -> int:
    """Tokens that the prompts of the second and of the third turn begin with alike."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    second, third = (
        tokenizer.encode(
            tokenizer.apply_chat_template(
                messages[:end], tokenize=False, add_generation_prompt=True, enable_thinking=False
            ),
            add_special_tokens=False,
        )
        for end in (4, 6)
    )
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(second, third, strict=False))
    return sum(1 for _ in pairs)


def conversation(model: Path, home: Path, *, restart: bool) -> tuple[list[Reply], Messages, int]:
    """Take three turns, the third after a restart if wanted; also its tokens read from disk."""
    messages: Messages = [{"role": "system", "content": RULES}]
    flags = ("--model", str(model), *options(home))
    with served(*flags, home=home) as server:
        replies = [ask(server, messages, question) for question in QUESTIONS[:2]]
        if not restart:
            replies.append(ask(server, messages, QUESTIONS[2]))
            restored = request_of(server, replies[2])["restored_tokens"]
        assert server.stop() == 0, server.output
    if restart:
        with served(*flags, home=home) as server:
            replies.append(ask(server, messages, QUESTIONS[2]))
            restored = request_of(server, replies[2])["restored_tokens"]
            assert server.stop() == 0, server.output
    return replies, messages, restored


def failures(model: Path, home: Path) -> list[str]:
    """Run both conversations, print their turns, and return what is wrong."""
    found = {}
    for name, restart in (("warm", False), ("restarted", True)):
        folder = home / name
        folder.mkdir()
        found[name] = replies, _, restored = conversation(model, folder, restart=restart)
        for n, reply in enumerate(replies, 1):
            counts = f"prompt {reply.prompt_tokens} cached {reply.cached_tokens}"
            disk = f" ({restored} from disk)" if n == 3 else ""
            print(f"{name} turn {n}: {counts}{disk}")
    (warm, messages, none), (again, _, restored) = found["warm"], found["restarted"]
    least, cached = least_cached(model, messages), warm[2].cached_tokens
    checks = (
        ("first turns are cold", (warm[0].cached_tokens, again[0].cached_tokens), (0, 0)),
        ("second turns reuse the same", again[1].cached_tokens, warm[1].cached_tokens),
        ("the third turn reuses the same after a restart", again[2].cached_tokens, cached),
        ("without a restart nothing is read from disk", none, 0),
        ("after it all that is reused is", restored, cached),
        ("replies are the same", [one.text for one in again], [one.text for one in warm]),
    )
    wrong = [f"{what}: {got!r}, not {due!r}" for what, got, due in checks if got != due]
    if cached is None or cached < least or least < (warm[0].prompt_tokens or 0):
        wrong.append(f"the third turn reuses {cached} tokens; the two prompts share {least}")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, metavar="PATH|HUB_ID")
    name = parser.parse_args(arguments).model
    path = Path(name) if Path(name).is_dir() else Path(snapshot_download(name))
    with tempfile.TemporaryDirectory() as home:
        wrong = failures(path, Path(home))
    for line in wrong:
        print(f"WRONG {line}")
    print("failed" if wrong else "all counts are exact")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
