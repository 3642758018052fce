"""A turn behind three images, beside mlx-vlm's own server.

`python -m tests.proofs.images_beside [--python PYTHON] [--family NAME]` plays conversations to
this server and to `mlx_vlm.server`, once with its defaults and once with its prefix cache
(`APC_ENABLED=1`), on the same model of random weights. Each conversation has three requests: one
with three images, the next turn with text alone, and one with a fourth image. All servers run, one
is used at a time, and their order changes with each conversation. It prints, for each server, the
median of the tokens that were fed and of the time to the first token, and for the others the median
of the ratios to this server's, pair by pair. PYTHON: that of an environment in which
`mlx_vlm.server` runs, with fastapi and python-multipart; by default this one.
"""

from __future__ import annotations

import argparse
import base64
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from mlxcache.bench.client import Reply
from mlxcache.bench.process import Launch, Server, ours, running
from mlxcache.bench.turns import Filler
from tests.toys.images import screenshot
from tests.toys.toy import make_toy

PAIRS = 9
REQUESTS = ("three images", "next turn, text", "next turn, one more image")
SYSTEM_TOKENS, SAID_TOKENS = 1000, 50
COLUMNS, ROWS = 16, 12
"""Tokens of an image along each side: 512 x 384 pixels."""

Messages = list[dict[str, Any]]


def theirs(python: str, folder: Path, *, cached: bool) -> Launch:
    """Return how to start mlx-vlm's server, with its prefix cache or with its defaults.

    `python`: that of its environment. `folder`: for the files of its cache.
    """
    name = "mlx_vlm.server, APC_ENABLED=1" if cached else "mlx_vlm.server"
    serve = (python, "-m", "mlx_vlm.server", "--model", "{model}", "--port", "{port}")
    command = ("env", f"APC_ENABLED={int(cached)}", f"MLX_VLM_CACHE_HOME={folder}", *serve)
    return Launch(name, (*command, "--host", "127.0.0.1", "--log-level", "WARNING"), foreign=True)


def conversation(filler: Filler, seed: int) -> Iterator[Messages]:
    """Yield the messages of the three requests of one conversation.

    Replies in it are the client's own words, so that every server has to compute the same text.
    """

    def said(name: str, *images: int) -> dict[str, Any]:
        text = filler.text(SAID_TOKENS, f"{seed} {name}")
        parts = [{"type": "image_url", "image_url": {"url": _url(image)}} for image in images]
        return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}

    reply = {"role": "assistant", "content": "I see it."}
    first = 10 * seed
    messages: Messages = [
        {"role": "system", "content": filler.text(SYSTEM_TOKENS, f"{seed} system")},
        said("one", first),
        reply,
        said("two", first + 1),
        reply,
        said("three", first + 2),
    ]
    yield messages
    messages = [*messages, reply, said("next")]
    yield messages
    yield [*messages, reply, said("four", first + 3)]


def _url(seed: int) -> str:
    data = screenshot(seed, COLUMNS, ROWS).data
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def play(server: Server, filler: Filler, seed: int) -> list[Reply]:
    return [server.client.chat(messages, 2) for messages in conversation(filler, seed)]


def show(
    out: Callable[[str], object],
    name: str,
    played: Sequence[list[Reply]],
    ours: Sequence[list[Reply]],
) -> None:
    for i, request in enumerate(REQUESTS):
        prompt, fed, first = (
            median(getattr(replies[i], field) or 0 for replies in played)
            for field in ("prompt_tokens", "fed_tokens", "first_s")
        )
        ratio = median(a[i].first_s / b[i].first_s for a, b in zip(played, ours, strict=True))
        out(
            f"{name:32} {request:28} {prompt:7,.0f} tokens, {fed:7,.0f} fed, "
            f"{1e3 * first:9,.1f} ms  {ratio:6.2f}"
        )


def main(arguments: Sequence[str] | None = None, out: Callable[[str], object] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--family", default="qwen3_vl")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args(arguments)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_toy(
            folder / "model", given.family, images=True, hidden=given.hidden, layers=given.layers,
            heads=4, kv_heads=2, head_dim=64, vocab_size=4096,
        )  # fmt: skip
        launches = (
            ours(folder / "cache", "--ram", "2GB"),
            theirs(given.python, folder / "theirs", cached=True),
            theirs(given.python, folder / "theirs", cached=False),
        )
        servers = [stack.enter_context(running(one, model, folder, 300)) for one in launches]
        filler = Filler(model)
        played: dict[str, list[list[Reply]]] = {server.name: [] for server in servers}
        for seed in range(given.pairs + 1):
            for server in servers if seed % 2 else servers[::-1]:
                replies = play(server, filler, seed)
                if seed:  # the first compiles kernels
                    played[server.name].append(replies)
        for server in servers:
            show(out, server.name, played[server.name], played[servers[0].name])


if __name__ == "__main__":
    main()
