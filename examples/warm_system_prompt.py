"""Compute tools and system prompt ahead of time, so that even the first turn is warm.

    python examples/warm_system_prompt.py [--base-url http://127.0.0.1:8081]

Needs `pip install openai`. `mlxcache warm FILE` does the same, and `mlxcache serve --warm FILE`
does it whenever the server starts.
"""

import argparse
import sys
import time

import httpx

try:
    from openai import OpenAI
except ModuleNotFoundError:
    sys.exit(f"This example needs OpenAI's SDK: {sys.executable} -m pip install openai")

SYSTEM = "You review patches. Say what is wrong, where, and how to put it right. " * 40
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "The text of a file.",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
]


def main() -> None:
    """Warm the tools and the system prompt, then start a conversation with them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://127.0.0.1:8081")
    parser.add_argument("--api-key", default="local")
    parser.add_argument("--max-tokens", type=int, default=30)
    args = parser.parse_args()
    head = {"messages": [{"role": "system", "content": SYSTEM}], "tools": TOOLS}
    warmed = httpx.post(
        f"{args.base_url}/v1/cache/warm",
        json=head,
        headers={"Authorization": f"Bearer {args.api_key}"},
        timeout=None,
    )
    warmed.raise_for_status()
    figures = warmed.json()
    print(f"warmed {figures['prompt_tokens']} tokens, of which {figures['fed_tokens']} were fed")

    client = OpenAI(base_url=f"{args.base_url}/v1", api_key=args.api_key)
    began = time.perf_counter()
    reply = client.chat.completions.create(
        model="current-model",
        messages=[*head["messages"], {"role": "user", "content": "Where do I begin?"}],
        tools=TOOLS,
        max_tokens=args.max_tokens,
    )
    usage = reply.usage
    cached = usage.prompt_tokens_details.cached_tokens
    print(f"first turn: {cached} of {usage.prompt_tokens} prompt tokens cached", end=", ")
    print(f"answered after {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    main()
