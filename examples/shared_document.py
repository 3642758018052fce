"""Ask about one document in many sessions. The document is computed once and stored once.

    python examples/shared_document.py [--base-url http://127.0.0.1:8081] [--document FILE]

Needs `pip install openai`. The first question computes the document. The others, each in its own
session, reuse it.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

try:
    from openai import OpenAI
except ModuleNotFoundError:
    sys.exit(f"This example needs OpenAI's SDK: {sys.executable} -m pip install openai")

DOCUMENT = "Section {n}: a cache keeps what was computed, so that it need not be computed again. "
QUESTIONS = ["What is it about?", "Who is it for?", "What is missing?", "Sum it up in a line."]


def main() -> None:
    """Ask the first question alone, then all others at the same time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://127.0.0.1:8081")
    parser.add_argument("--api-key", default="local")
    parser.add_argument("--document", type=Path)
    parser.add_argument("--max-tokens", type=int, default=30)
    args = parser.parse_args()
    document = (
        args.document.read_text()
        if args.document
        else "".join(DOCUMENT.format(n=n) for n in range(60))
    )
    client = OpenAI(base_url=f"{args.base_url}/v1", api_key=args.api_key)
    cache = f"{args.base_url}/v1/cache"
    headers = {"Authorization": f"Bearer {args.api_key}"}
    before = httpx.get(cache, headers=headers).json()["ram"]["used_bytes"]

    def ask(at: int) -> tuple[int, int]:
        reply = client.chat.completions.create(
            model="current-model",
            messages=[
                {"role": "system", "content": f"Answer from this document alone.\n\n{document}"},
                {"role": "user", "content": QUESTIONS[at]},
            ],
            max_tokens=args.max_tokens,
            extra_headers={"X-Session-Id": f"document-{at}"},
        )
        return reply.usage.prompt_tokens_details.cached_tokens, reply.usage.prompt_tokens

    first = ask(0)
    with ThreadPoolExecutor() as pool:
        rest = list(pool.map(ask, range(1, len(QUESTIONS))))
    for at, (cached, prompt) in enumerate([first, *rest]):
        print(f"session {at}: {cached} of {prompt} prompt tokens cached  {QUESTIONS[at]}")
    held = httpx.get(cache, headers=headers).json()["ram"]["used_bytes"] - before
    print(f"{len(QUESTIONS)} sessions together use {held / 1e6:.1f} MB more RAM than before")


if __name__ == "__main__":
    main()
