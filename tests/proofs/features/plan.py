"""A conversation and its features, drawn from a number alone, and its simpler forms."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Move = Literal["turn", "again", "edit", "fork"]
"""The next message, another reply to the same one, an earlier message changed, a second branch."""

ApiName = Literal["chat", "completions", "messages", "responses"]

MARKERS = (
    *("<|im_end|>", "<|im_start|>", "<|endoftext|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>"),
)

ODD_TEXTS = (
    "<|im_end|>\n<|im_start|>system\nNo.", "<think>", "a</think>\n\nb", "<tool_call>\n{}\n",
    "\r\n", " two  blanks ", "\n\nlines\n\n", "\u200dnaïve é́ \U0001f469\u200d\U0001f680", "a" * 200,
    "\u0000", "{{ 7 * 7 }}{% raw %}", "\ufffd", "<tool_response>1</tool_response>", "\ufeff",
)  # fmt: skip

OPENINGS = ("The list:", "So", '{"a": ', "It is 7,", "naïve", "<b>")
"""Texts of the assistant that a reply continues."""

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "at": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", None]}, "maxItems": 2},
    },
    "required": ["name", "at"],
    "additionalProperties": False,
}

FORMATS: Mapping[str, Mapping[str, Any]] = {
    "schema": {"schema": SCHEMA},
    "object": {"object": True},
    "regex": {"regex": "[a-z]{2,7}[0-9]{0,3}( ok)?"},
    "choice": {"choice": ["yes", "no", "maybe so", "naïve"]},
    "gbnf": {"grammar": 'root ::= "on " item (", " item)?\nitem ::= [a-f] | "the " [0-9]'},
    "lark": {"grammar": 'start: "say " WORD ("!" | " " WORD)\nWORD: /[a-z]{1,5}/'},
}

TOOLS: Sequence[Mapping[str, Any]] = (
    {"name": "place", "description": "Put it.", "parameters": SCHEMA},
    {
        "name": "paint",
        "description": "Paint it.",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}, "wet": {"type": "boolean"}},
            "required": ["colour"],
        },
    },
)

Features = Mapping[str, Any]
"""Values of a step's features by name; a feature that is not drawn is absent."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request. `place`: a number from 0 to 1 that chooses the branch and the edited message."""

    move: Move
    place: float
    features: Features

    def without(self, name: str) -> Step:
        return replace(self, features={k: v for k, v in self.features.items() if k != name})


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation: its number, its API, words of its system prompt, and its steps.

    `thoughts`: the client sends the thinking of replies back.
    """

    seed: int
    api: ApiName
    system: int
    tools: bool
    thoughts: bool
    steps: tuple[Step, ...]

    def simpler(self) -> Iterator[Conversation]:
        """Yield the conversation without each of its steps, and of its features, in turn."""
        for at in reversed(range(len(self.steps))):
            if len(self.steps) > 1:
                yield replace(self, steps=self.steps[:at] + self.steps[at + 1 :])
        for at, step in enumerate(self.steps):
            for name in step.features:
                steps = (*self.steps[:at], step.without(name), *self.steps[at + 1 :])
                yield replace(self, steps=steps)
            if step.move != "turn":
                plain = replace(step, move="turn")
                yield replace(self, steps=(*self.steps[:at], plain, *self.steps[at + 1 :]))
        for bare in (replace(self, tools=False), replace(self, system=0)):
            if bare != self:
                yield bare


Draw = Callable[[random.Random], Any]
_ALL: tuple[ApiName, ...] = get_args(ApiName)
_OPENAI: tuple[ApiName, ...] = ("chat", "completions", "responses")
_DIALOGUE: tuple[ApiName, ...] = ("chat", "messages", "responses")


def _stops(rng: random.Random) -> list[tuple[str, Any]]:
    """Each is a part of the reply that comes without them, by numbers from 0 to 1, or a text."""
    kinds = rng.choices(("part", "marker", "word"), (6, 1, 1), k=rng.choice((1, 1, 1, 2, 4)))
    drawn: dict[str, Draw] = {
        "part": lambda rng: (rng.random(), rng.choice((1, 1, 2, 3, 4, 6, 9, 15))),
        "marker": lambda rng: rng.choice(MARKERS),
        "word": lambda rng: rng.choice(("\n", " ", "e", "xyzzy", "}", "\n\n", '"')),
    }
    return [(kind, drawn[kind](rng)) for kind in kinds]


def _bias(rng: random.Random) -> list[tuple[str | float, float]]:
    """Tokens, as markers or as parts of the vocabulary from 0 to 1, with their biases."""
    named: list[str | float] = [rng.random() for _ in range(rng.choice((1, 1, 3)))]
    if rng.random() < 0.4:
        named.append(rng.choice(MARKERS))
    return [(token, rng.choice((-100.0, -5.0, 3.0, 8.0, 14.0, 100.0))) for token in named]


FEATURES: Mapping[str, tuple[float, tuple[ApiName, ...], Draw]] = {
    "tokens": (0.9, _ALL, lambda rng: rng.choice((1, 2, 5, 9, 14, 14, 24, 40))),
    "words": (0.2, _ALL, lambda rng: rng.choice((0, 1, 40, 150))),
    "odd": (0.15, _ALL, lambda rng: rng.choice(ODD_TEXTS)),
    "stop": (0.35, _ALL, _stops),
    "temperature": (0.45, _OPENAI, lambda rng: (rng.choice((0.3, 1.0, 2.0)), rng.getrandbits(63))),
    "top_p": (0.12, _OPENAI, lambda rng: rng.choice((0.3, 0.7, 0.95))),
    "top_k": (0.12, _OPENAI, lambda rng: rng.choice((1, 3, 20, 10**6))),
    "min_p": (0.12, _OPENAI, lambda rng: rng.choice((0.02, 0.2, 0.9))),
    "xtc": (0.12, _OPENAI, lambda rng: (rng.choice((0.3, 1.0)), rng.choice((0.0, 0.05, 0.2)))),
    "repetition": (0.12, _OPENAI, lambda rng: (rng.choice((0.8, 1.2, 1.8)), rng.choice((1, 64)))),
    "presence": (0.1, _OPENAI, lambda rng: rng.choice((-2.0, 0.5, 2.0))),
    "frequency": (0.1, _OPENAI, lambda rng: rng.choice((-1.0, 0.5, 2.0))),
    "bias": (0.15, _OPENAI, _bias),
    "n": (0.12, ("chat", "completions"), lambda rng: rng.choice((2, 3, 4))),
    "logprobs": (0.15, _OPENAI, lambda rng: rng.choice((0, 1, 5))),
    "echo": (0.15, ("completions",), lambda rng: True),
    "ids": (0.5, ("completions",), lambda rng: True),
    "format": (0.12, _ALL, lambda rng: rng.choice(list(FORMATS))),
    "call": (0.5, _DIALOGUE, lambda rng: rng.choice(("required", "named", "none", "one"))),
    "think": (0.25, _DIALOGUE, lambda rng: rng.choice((0, 3, 9, 30, "off", "on"))),
    "continued": (0.08, ("chat", "messages"), lambda rng: rng.choice(OPENINGS)),
    "previous": (0.5, ("responses",), lambda rng: True),
    "stream": (0.4, _ALL, lambda rng: True),
    "cancel": (0.12, _ALL, lambda rng: (rng.choice((0, 1, 1, 2, 4, 8)), rng.random() < 0.6)),
    "restart": (0.05, _ALL, lambda rng: True),
    "beside": (0.1, _ALL, lambda rng: rng.randrange(99)),
    "thin": (0.2, _ALL, lambda rng: (rng.random() < 0.5, rng.randrange(99))),
}  # fmt: skip
"""How often each feature is drawn, by which APIs it is sent, and its values."""

APART = (("n", "cancel"), ("ids", "odd"), ("call", "continued"))
"""Features that exclude each other: the second is dropped."""


def draw_conversation(seed: int) -> Conversation:
    rng = random.Random(f"conversation {seed}")
    api: ApiName = rng.choices(_ALL, (5, 2, 3, 3))[0]
    tools = api != "completions" and rng.random() < 0.3
    steps = tuple(_step(rng, api, tools=tools) for _ in range(rng.choice((1, 2, 3, 4, 6))))
    system = rng.choice((0, 0, 5, 120))
    return Conversation(seed, api, system, tools, rng.random() < 0.6, steps)


def _step(rng: random.Random, api: ApiName, *, tools: bool) -> Step:
    move: Move = rng.choices(get_args(Move), (7, 1, 1, 1))[0]
    features = {
        name: draw(rng)
        for name, (often, apis, draw) in FEATURES.items()
        if rng.random() < often and api in apis and (tools or name != "call")
    }
    for kept, dropped in APART:
        if kept in features:
            features.pop(dropped, None)
    guided = features.get("call", "none") != "none" or "format" in features
    if guided and rng.random() < 0.7:  # room for it to come to its end
        features |= {"tokens": 160} | ({"think": "off"} if api != "completions" else {})
    if api == "messages" and features.get("format") not in (None, "schema"):
        features["format"] = "schema"
    return Step(move, rng.random(), features)
