"""Run the engine in a Python program, without HTTP: load a model, chat, stream, close.

    python examples/embedded.py [--model PATH|HUB_ID] [--cache-dir DIR]

Without --model, the small built-in demo model is loaded. Computed KV is written to disk, as with a
server: run the program again, and the first turn is warm.
"""

import argparse
import asyncio

from mlxcache.embed import Model
from mlxcache.types import Text

SYSTEM = "You explain how computers work, in short sentences and with one example each. " * 20


async def main() -> None:
    """Hold a conversation of two turns, and stream the second reply."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--cache-dir")
    parser.add_argument("--max-tokens", type=int, default=30)
    args = parser.parse_args()
    folder = {"cache_dir": args.cache_dir} if args.cache_dir else {}
    async with Model(args.model, **folder) as model:
        print(f"{model.info.id}, context {model.info.context_length}")
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "What is a cache?"},
        ]
        reply = await model.chat(messages, max_tokens=args.max_tokens, session="embedded")
        restored = reply.restored_tokens
        print(
            f"turn 1: {reply.cached_tokens} of {reply.prompt_tokens} prompt tokens cached", end=""
        )
        print(f", {restored} of them from disk")
        messages += [
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": "Why is it fast?"},
        ]
        stream = await model.stream(messages, max_tokens=args.max_tokens, session="embedded")
        async with stream:
            async for event in stream:
                if isinstance(event, Text):
                    print(event.text, end="", flush=True)
        record = stream.record
        print(f"\nturn 2: {record.cached_tokens} of {record.prompt_tokens} prompt tokens cached")


if __name__ == "__main__":
    asyncio.run(main())
