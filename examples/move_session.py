"""Move a conversation to another machine: snapshot it on one server, restore it on another.

    python examples/move_session.py --to http://other-mac:8081 [--from http://127.0.0.1:8081]

Needs `pip install openai`. Both servers must serve the same model. The snapshot is streamed,
so this program needs little memory even for a session of 10 GB.
"""

import argparse
import sys

import httpx

try:
    from openai import OpenAI
except ModuleNotFoundError:
    sys.exit(f"This example needs OpenAI's SDK: {sys.executable} -m pip install openai")

SYSTEM = "You keep a diary of a journey, in short sentences. " * 40


def main() -> None:
    """Hold a turn on one server, move the session, and hold the next turn on the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--from", dest="here", default="http://127.0.0.1:8081")
    parser.add_argument("--to", dest="there", required=True)
    parser.add_argument("--api-key", default="local")
    parser.add_argument("--max-tokens", type=int, default=30)
    args = parser.parse_args()
    headers = {"Authorization": f"Bearer {args.api_key}"}

    def turn(url: str, messages: list) -> str:
        reply = OpenAI(base_url=f"{url}/v1", api_key=args.api_key).chat.completions.create(
            model="current-model",
            messages=messages,
            max_tokens=args.max_tokens,
            extra_headers={"X-Session-Id": "diary"},
        )
        usage = reply.usage
        cached = usage.prompt_tokens_details.cached_tokens
        print(f"{url}: {cached} of {usage.prompt_tokens} prompt tokens cached")
        return reply.choices[0].message.content or "."

    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Day one."},
    ]
    messages.append({"role": "assistant", "content": turn(args.here, messages)})
    session = find(args.here, "diary", headers)
    move(f"{args.here}/v1/sessions/{session}/snapshot", f"{args.there}/v1/sessions", headers)
    turn(args.there, [*messages, {"role": "user", "content": "Day two."}])


def find(url: str, label: str, headers: dict) -> str:
    """Return the id of the session with this label."""
    sessions = httpx.get(f"{url}/v1/sessions", headers=headers).raise_for_status().json()["data"]
    return next(one["id"] for one in sessions if one["label"] == label)


def move(snapshot: str, sessions: str, headers: dict) -> None:
    """Stream a snapshot from one server to the other, 1 MiB at a time."""
    with httpx.stream("GET", snapshot, headers=headers, timeout=None) as source:
        source.raise_for_status()
        length = {"Content-Length": source.headers["Content-Length"]}
        restored = httpx.post(
            sessions, content=source.iter_bytes(1 << 20), headers=headers | length, timeout=None
        )
        restored.raise_for_status()
    one = restored.json()
    print(
        f"moved {one['tokens']} tokens, {one['disk_bytes'] / 1e6:.1f} MB: it is {one['id']} there"
    )


if __name__ == "__main__":
    main()
