"""Hold a conversation with OpenAI's SDK and print how much of each prompt was reused.

    python examples/openai_chat.py [--base-url http://127.0.0.1:8081]

Needs `pip install openai`. From the second turn on, the server computes only the new message.
"""

import argparse
import sys
import time

try:
    from openai import OpenAI
except ModuleNotFoundError:
    sys.exit(f"This example needs OpenAI's SDK: {sys.executable} -m pip install openai")

SYSTEM = "You explain how computers work, in short sentences and with one example each. " * 40
QUESTIONS = ["What is a cache?", "Why is it fast?", "When does it not help?"]


def main() -> None:
    """Ask every question in one conversation."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://127.0.0.1:8081")
    parser.add_argument("--api-key", default="local")
    parser.add_argument("--max-tokens", type=int, default=60)
    args = parser.parse_args()
    client = OpenAI(base_url=f"{args.base_url}/v1", api_key=args.api_key)
    messages = [{"role": "system", "content": SYSTEM}]
    for turn, question in enumerate(QUESTIONS, start=1):
        messages.append({"role": "user", "content": question})
        messages.append(
            {"role": "assistant", "content": ask(client, messages, args.max_tokens, turn)}
        )


def ask(client: OpenAI, messages: list, max_tokens: int, turn: int) -> str:
    """Stream one reply, print it with its token counts, and return its text."""
    began, first, text, usage = time.perf_counter(), None, "", None
    stream = client.chat.completions.create(
        model="current-model",
        messages=messages,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage
        for choice in chunk.choices:
            if choice.delta.content:
                first = first or time.perf_counter()
                text += choice.delta.content
    print(f"> {messages[-1]['content']}\n{text.strip()}")
    cached = usage.prompt_tokens_details.cached_tokens
    waited = (first or time.perf_counter()) - began
    print(
        f"turn {turn}: {cached} of {usage.prompt_tokens} prompt tokens cached, "
        f"first word after {waited:.2f} s\n"
    )
    return text


if __name__ == "__main__":
    main()
