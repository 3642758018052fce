"""Stop strings that cut through tokens: where a reply ends, and what the turn after it feeds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlxcache.model.demo import materialise
from tests.conftest import ToyMaker
from tests.server.api import CHAT, MESSAGES, Api, events, user, words
from tests.server.conftest import Start

PARTS = ("日本語", "naïve ", "Привет, ", "🦀🐙", "مرحبا ", "हिन्दी", "cafe\u0301 ", "ไทย", "words ")
SCHEMA = {"type": "string", "pattern": f"^(?:{'|'.join(PARTS)}){{9,14}}$"}
"""A format in which a toy, whose tokens are bytes, writes whole characters of several scripts."""

MARKERS = ("<|im_end|>", "<|im_start|>assistant", "<tool_call>", "<think>", "<|im", "_end|>", "\n")
NEW, REPLY = 10, 64
"""Tokens that a turn may feed beside its message: the token that was cut through, spelt anew; and
most tokens of a reply, all of which is fed again where layers cannot be cut at the stop string."""

CUT_ANYWHERE = ("demo", "llama")

Body = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """A reply; `stop` is the stop string that ended it, if one did."""

    text: str
    stop: str | None
    prompt: int
    cached: int


@dataclass(frozen=True)
class Client:
    """A client of one of the APIs, which reads its replies as a stream or not."""

    api: Api
    path: str
    stream: bool

    def ask(self, messages: Sequence[Body], stops: Sequence[str] = (), **more: Any) -> Reply:
        body = {"model": "m", "messages": messages, "max_tokens": REPLY, "temperature": 0} | more
        if stops:
            body["stop" if self.path == CHAT else "stop_sequences"] = list(stops)
        if not self.stream:
            response = self.api.post(self.path, body)
            assert response.status_code == 200, response.text
            made = response.json()
            return self._of_chat([made]) if self.path == CHAT else self._of_messages(made)
        body |= {"stream": True}
        if self.path == CHAT:
            body |= {"stream_options": {"include_usage": True}}
        with self.api.http.stream("POST", self.path, json=body) as response:
            assert response.status_code == 200, response.read()
            parts = [data for name, data in events(response) if name != "comment"]
        if self.path == CHAT:
            return self._of_chat(parts[:-1])
        return self._of_messages(_joined(parts))

    @staticmethod
    def _of_chat(parts: Sequence[Body]) -> Reply:
        choices = [choice for part in parts for choice in part["choices"]]
        said = [choice.get("delta", choice.get("message")).get("content") for choice in choices]
        usage = parts[-1]["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        stop = choices[-1].get("stop_reason")
        return Reply("".join(filter(None, said)), stop, usage["prompt_tokens"], cached)

    @staticmethod
    def _of_messages(made: Body) -> Reply:
        usage, read = made["usage"], made["usage"]["cache_read_input_tokens"]
        text = "".join(block.get("text", "") for block in made["content"])
        size = usage["input_tokens"] + usage["cache_creation_input_tokens"] + read
        assert (made["stop_reason"] == "stop_sequence") == (made["stop_sequence"] is not None)
        return Reply(text, made["stop_sequence"], size, read)

    def format(self) -> Body:
        """The fields that ask for `SCHEMA`."""
        if self.path == MESSAGES:
            return {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
        named = {"name": "text", "schema": SCHEMA}
        return {"response_format": {"type": "json_schema", "json_schema": named}}


def _joined(parts: Sequence[Body]) -> Body:
    """A message whose events are `parts`."""
    made: Body = parts[0]["message"] | {"content": []}
    for part in parts:
        if part["type"] == "content_block_delta":
            made["content"].append(part["delta"])
        elif part["type"] == "message_delta":
            made |= part["delta"] | {"usage": part["usage"]}
    return made


def cut(whole: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, and that string."""
    for end in range(1, len(whole) + 1):
        found = [stop for stop in stops if whole[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return whole[: end - len(longest)], longest
    return whole, None


def draw(rng: random.Random, whole: str) -> list[str]:
    """One to four stop strings, most of them from anywhere in the reply."""
    stops = []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(whole))
        size = rng.choice([1, 2, 3, 5, 8, 13, 21])
        taken = whole[at : at + size]
        stops.append(
            rng.choice(
                [taken, taken, taken, taken + "\u2603", rng.choice(MARKERS), rng.choice(PARTS)]
            )
        )
    return stops


def check(
    client: Client, rng: random.Random, wholes: dict[int, str], seen: Counter[str], spare: int
) -> None:
    """Ask twice, without stop strings and with some, and then for the next turn."""
    number = rng.randrange(12)
    more: Mapping[str, Any] = client.format() if number % 3 == 0 else {}
    asked = [user(words(1000 + number, 60))]
    if number not in wholes:
        wholes[number] = client.ask(asked, **more).text
    stops = draw(rng, wholes[number])
    reply = client.ask(asked, stops, **more)
    text, stop = cut(wholes[number], stops)
    assert (reply.text, reply.stop) == (text, stop), (wholes[number], stops)
    seen["stopped" if stop else "not stopped"] += 1
    if not text.strip():
        seen["without text"] += 1
        return
    new = user(words(rng.randrange(10**6), 10))
    turn = [*asked, {"role": "assistant", "content": text}, new]
    again = client.ask(turn, stops, max_tokens=2)
    fed = again.prompt - again.cached
    most = client.ask([new], max_tokens=1).prompt + spare
    seen["tokens fed by next turns"] += fed
    seen["of tokens"] += again.prompt
    assert fed <= most, (wholes[number], stops, fed, most)


@pytest.fixture
def served(start: Start, toy: ToyMaker, tmp_path: Path) -> Callable[[str], Api]:
    """The server of the demo model, or of a toy's family."""
    return lambda model: start(
        f"stop strings {model}", materialise(tmp_path) if model == "demo" else toy(model)
    )


def run(api: Api, model: str, cases: int) -> None:
    wholes: dict[int, str] = {}
    seen: Counter[str] = Counter()
    spare = NEW if model in CUT_ANYWHERE else NEW + REPLY
    for case in range(cases):
        client = Client(api, (CHAT, MESSAGES)[case % 2], stream=case % 4 > 1)
        check(client, random.Random(f"{model} {case}"), wholes, seen, spare)
    print(f"\n{model}: {cases} cases: {dict(seen)}")
    assert api.http.get("/health").json()["status"] == "ok"


@pytest.mark.parametrize("model", ["demo", "llama", "qwen3_5"])
def test_stop_strings(served: Callable[[str], Api], model: str) -> None:
    run(served(model), model, 8)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["demo", "llama", "gemma3", "qwen3_5"])
def test_two_hundred_stop_strings(served: Callable[[str], Api], model: str) -> None:
    run(served(model), model, 200)
