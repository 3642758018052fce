"""A conversation through Anthropic's SDK that prints, turn by turn, what was reused.

    python examples/anthropic_chat.py [--base-url http://127.0.0.1:8081]

Needs `pip install anthropic`. From the second turn on, only the new message is computed.
"""

import argparse
import time

from anthropic import Anthropic

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
    """Stream one reply, print it with its figures, and return it."""
    began, first, text = time.perf_counter(), None, ""
    # The mark says where a prefix ends that is worth keeping. mlxcache keeps them all, and uses
    # it only to tell "written to the cache" from "input" in the usage that it reports.
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
