"""Fork a conversation and continue it in two ways. The common part is computed once.

    python examples/fork_and_compare.py [--base-url http://127.0.0.1:8081]

Needs `pip install openai`. A fork is a separate session: you can rename, pin, export or remove it.
"""

import argparse
import sys

import httpx

try:
    from openai import OpenAI
except ModuleNotFoundError:
    sys.exit(f"This example needs OpenAI's SDK: {sys.executable} -m pip install openai")

SYSTEM = "You plan small programs, in short sentences. " * 40
WAYS = ["Plan it with one file.", "Plan it with many small files."]


def main() -> None:
    """Hold one turn, fork the session, and hold a second turn in each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://127.0.0.1:8081")
    parser.add_argument("--api-key", default="local")
    parser.add_argument("--max-tokens", type=int, default=40)
    args = parser.parse_args()
    http = httpx.Client(
        base_url=args.base_url, headers={"Authorization": f"Bearer {args.api_key}"}, timeout=None
    )
    client = OpenAI(base_url=f"{args.base_url}/v1", api_key=args.api_key)

    def turn(messages: list, session: str) -> str:
        reply = client.chat.completions.create(
            model="current-model",
            messages=messages,
            max_tokens=args.max_tokens,
            extra_headers={"X-Session-Id": session},
        )
        usage = reply.usage
        cached = usage.prompt_tokens_details.cached_tokens
        print(f"{session}: {cached} of {usage.prompt_tokens} prompt tokens cached")
        return reply.choices[0].message.content or "."

    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "A program that finds the same photo twice."},
    ]
    messages.append({"role": "assistant", "content": turn(messages, "plan")})

    sessions = http.get("/v1/sessions").raise_for_status().json()["data"]
    plan = next(one["id"] for one in sessions if one["label"] == "plan")
    fork = http.post(f"/v1/sessions/{plan}/fork", json={"name": "many files"}).raise_for_status()
    for session, way in zip(("plan", fork.json()["id"]), WAYS, strict=True):
        answer = turn([*messages, {"role": "user", "content": way}], session)
        print(f"> {way}\n{answer.strip()}\n")


if __name__ == "__main__":
    main()
