"""Hold a conversation with Anthropic's SDK and print how much of each prompt was reused.

    python examples/anthropic_chat.py [--base-url http://127.0.0.1:8081]

Needs `pip install anthropic`. From the second turn on, the server computes only the new message.
"""

import argparse
import sys
import time

try:
    from anthropic import Anthropic
except ModuleNotFoundError:
    sys.exit(f"This example needs Anthropic's SDK: {sys.executable} -m pip install anthropic")

SYSTEM = "You explain how computers work, in short sentences and with one example each. " * 40
QUESTIONS = ["What is a cache?", "Why is it fast?", "When does it not help?"]


def main() -> None:
    """Ask every question in one conversation."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://127.0.0.1:8081")
    parser.add_argument("--api-key", default="local")
    parser.add_argument("--max-tokens", type=int, default=60)
    args = parser.parse_args()
    client = Anthropic(base_url=args.base_url, api_key=args.api_key)
    messages: list = []
    for turn, question in enumerate(QUESTIONS, start=1):
        messages.append({"role": "user", "content": question})
        messages.append(
            {"role": "assistant", "content": ask(client, messages, args.max_tokens, turn)}
        )


def ask(client: Anthropic, messages: list, max_tokens: int, turn: int) -> str:
    """Stream one reply, print it with its token counts, and return its text."""
    began, first, text = time.perf_counter(), None, ""
    # cache_control marks the end of a prefix to cache. mlxcache caches every prefix; in the usage
    # it uses the mark to separate "written to the cache" from "input".
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    with client.messages.stream(
        model="current-model", system=system, messages=messages, max_tokens=max_tokens
    ) as stream:
        for piece in stream.text_stream:
            first = first or time.perf_counter()
            text += piece
        usage = stream.get_final_message().usage
    print(f"> {messages[-1]['content']}\n{text.strip()}")
    cached = usage.cache_read_input_tokens
    prompt = cached + usage.cache_creation_input_tokens + usage.input_tokens
    waited = (first or time.perf_counter()) - began
    print(
        f"turn {turn}: {cached} of {prompt} prompt tokens cached, first word after {waited:.2f} s\n"
    )
    return text or "."


if __name__ == "__main__":
    main()
