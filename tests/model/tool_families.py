"""Tool calls as each family's chat template writes them, and random ones.

The forms are those of the chat templates at huggingface.co: Qwen/Qwen3-Coder-30B-A3B-Instruct,
MiniMaxAI/MiniMax-M2 (and its docs/tool_calling_guide.md), zai-org/GLM-4.5 and GLM-4.7,
meituan-longcat/LongCat-Flash-Chat, moonshotai/Kimi-K2-Instruct and Kimi-K3 (encoding_k3.py),
openbmb/MiniCPM5, google/functiongemma-270m-it and gemma-4 (`format_argument`), LiquidAI/LFM2-1.2B,
mistralai/Devstral-Small, Qwen/Qwen3-8B; gpt-oss's is OpenAI's description of harmony. Muse Spark's
is what mlx-lm's parser describes.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Calls = Sequence[tuple[str, Mapping[str, Any]]]


def text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def qwen3_coder(calls: Calls) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(
            f"<parameter={k}>\n{text_or_json(v)}\n</parameter>\n" for k, v in arguments.items()
        )
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def minimax_m2(calls: Calls) -> str:
    blocks = "".join(
        f'<invoke name="{name}">\n'
        + "".join(
            f'<parameter name="{k}">{text_or_json(v)}</parameter>\n' for k, v in arguments.items()
        )
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{blocks}</minimax:tool_call>"


def muse_spark(calls: Calls) -> str:
    blocks = "".join(
        f'<atem:invoke name="{name}">'
        + "".join(
            f'<atem:parameter name="{k}">{text_or_json(v)}</atem:parameter>'
            for k, v in arguments.items()
        )
        + "</atem:invoke>"
        for name, arguments in calls
    )
    return f"<atem:function_calls>{blocks}</atem:function_calls>"


def minicpm5(calls: Calls) -> str:
    def value(argument: Any) -> str:
        text = text_or_json(argument)
        return f"<![CDATA[{text}]]>" if any(c in text for c in "<&\n") else text

    return "\n".join(
        f'<function name="{name}">'
        + "".join(f'<param name="{k}">{value(v)}</param>' for k, v in arguments.items())
        + "</function>"
        for name, arguments in calls
    )


def key_values(prefix: str, blank: str) -> Callable[[Calls], str]:
    def render(calls: Calls) -> str:
        return "\n".join(
            f"<{prefix}tool_call>{name}{blank}"
            + "".join(
                f"<{prefix}arg_key>{k}</{prefix}arg_key>{blank}"
                f"<{prefix}arg_value>{text_or_json(v)}</{prefix}arg_value>{blank}"
                for k, v in arguments.items()
            )
            + f"</{prefix}tool_call>"
            for name, arguments in calls
        )

    return render


def kimi_k3(calls: Calls) -> str:
    def kind(value: Any) -> str:
        kinds = ((str, "string"), (bool, "boolean"), (dict, "object"), (list, "array"))
        if value is None:
            return "null"
        return next((name for t, name in kinds if isinstance(value, t)), "number")

    blocks = "".join(
        f'<|open|>call tool="{name}" index="{i}"<|sep|>'
        + "".join(
            f'<|open|>argument key="{k}" type="{kind(v)}"<|sep|>'
            f"{text_or_json(v)}<|close|>argument<|sep|>"
            for k, v in arguments.items()
        )
        + "<|close|>call<|sep|>"
        for i, (name, arguments) in enumerate(calls, 1)
    )
    return f"<|open|>tools<|sep|>{blocks}<|close|>tools<|sep|>"


def kimi_k2(calls: Calls) -> str:
    blocks = "".join(
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>"
        f"{json.dumps(arguments, ensure_ascii=False)}<|tool_call_end|>"
        for i, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{blocks}<|tool_calls_section_end|>"


def hermes(calls: Calls) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def mistral(calls: Calls) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments, ensure_ascii=False)}"
        for name, arguments in calls
    )


def harmony(calls: Calls) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        f"{json.dumps(arguments, ensure_ascii=False)}<|call|>"
        for name, arguments in calls
    )


def pythonic(calls: Calls) -> str:
    def value(argument: Any) -> str:
        if isinstance(argument, str):
            for a, b in (("\\", "\\\\"), ("'", "\\'"), ("\n", "\\n"), ("\r", "\\r")):
                argument = argument.replace(a, b)
            return f"'{argument}'"
        if isinstance(argument, dict | list):
            return json.dumps(argument, ensure_ascii=False)
        return str(argument)

    body = ", ".join(
        f"{name}({', '.join(f'{k}={value(v)}' for k, v in arguments.items())})"
        for name, arguments in calls
    )
    return f"<|tool_call_start|>[{body}]<|tool_call_end|>"


def gemma(start: str, mark: str, end: str) -> Callable[[Calls], str]:
    def value(argument: Any) -> str:
        if isinstance(argument, str):
            return f"{mark}{argument}{mark}"
        if isinstance(argument, dict):
            return "{" + ",".join(f"{k}:{value(v)}" for k, v in sorted(argument.items())) + "}"
        if isinstance(argument, list):
            return "[" + ",".join(map(value, argument)) + "]"
        return json.dumps(argument)

    def render(calls: Calls) -> str:
        return "".join(f"{start}call:{name}{value(arguments)}{end}" for name, arguments in calls)

    return render


@dataclass(frozen=True, slots=True)
class Family:
    """How a family writes calls, by which parser of mlx-lm, and its complete ending of a call.

    `nested`: strings within lists and objects may hold anything.
    """

    render: Callable[[Calls], str]
    parser: str | None
    ending: str
    nested: bool = True


FAMILIES = {
    "qwen3_coder": Family(qwen3_coder, "qwen3_coder", "\n</parameter>\n</function>\n</tool_call>"),
    "minimax_m2": Family(minimax_m2, "minimax_m2", "</parameter>\n</invoke>\n</minimax:tool_call>"),
    "muse_spark": Family(
        muse_spark, "muse_spark", "</atem:parameter></atem:invoke></atem:function_calls>"
    ),
    "minicpm5": Family(minicpm5, "minicpm5", "]]></param></function>"),
    "glm47": Family(key_values("", ""), "glm47", "</arg_value></tool_call>"),
    "glm45": Family(key_values("", "\n"), "glm47", "</arg_value>\n</tool_call>"),
    "laguna": Family(key_values("", ""), "laguna", "</arg_value></tool_call>"),
    "longcat": Family(
        key_values("longcat_", "\n"), "longcat", "</longcat_arg_value>\n</longcat_tool_call>"
    ),
    "kimi_k3": Family(
        kimi_k3, "kimi_k3", "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "kimi_k2": Family(kimi_k2, "kimi_k2", '"}<|tool_call_end|><|tool_calls_section_end|>'),
    "json_tools": Family(hermes, "json_tools", '"}}\n</tool_call>'),
    "generic": Family(hermes, None, '"}}\n</tool_call>'),
    "mistral": Family(mistral, "mistral", '"}'),
    "harmony": Family(harmony, None, '"}<|call|>'),
    "pythonic": Family(pythonic, "pythonic", "')]<|tool_call_end|>"),
    "gemma4": Family(
        gemma("<|tool_call>", '<|"|>', "<tool_call|>"),
        "gemma4",
        '<|"|>}<tool_call|>',
        nested=False,
    ),
    "function_gemma": Family(
        gemma("<start_function_call>", "<escape>", "<end_function_call>"),
        "function_gemma",
        "<escape>}<end_function_call>",
        nested=False,
    ),
}

CLOSINGS = (
    *("</parameter>", "</function>", "</tool_call>", "</invoke>", "</minimax:tool_call>"),
    *("</atem:parameter>", "</atem:invoke>", "</atem:function_calls>", "</param>", "]]>"),
    *("</arg_key>", "</arg_value>", "</longcat_arg_value>", "</longcat_tool_call>"),
    *("<|close|>argument<|sep|>", "<|close|>call<|sep|>", "<|close|>tools<|sep|>"),
    *("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|call|>", "<|end|>"),
    *('<|"|>', "<tool_call|>", "<escape>", "<end_function_call>", "]", "}", ")]", "\\"),
    *(family.ending for family in FAMILIES.values()),
)
PLAIN = (
    *("a", "word ", "  ", "\n", "\n\n", "\t", "\r\n", "```python\n", "\n```", "'", '"', "\\n"),
    *('{"a": "b"}', '[1, "x', "null", "true", "None", "17", "1e400", "<", ">", "&amp;", "="),
    *("\x00\x1b[31m\x7f", "é", "日本", "🎉", "\u2028", "\u200d", "e\u0301", ", x=1", "${HOME}"),
)

NAMES = ("path", "content", "old_string", "days", "a", "x-y", "in", "größe", "_n", "items2")
TOOLS = ("look", "write_file", "mcp__repo__search", "get-it")


class Maker:
    """Makes random tools, and calls of them. `family`: whose marker `without` leaves out."""

    def __init__(self, family: Family, seed: int, without: str = ""):
        self.random = random.Random(seed)
        pieces = [p for p in CLOSINGS if not without or without not in p]
        self._pieces = (*pieces, *PLAIN)
        self._nested = self._pieces if family.nested else PLAIN

    def tools(self) -> list[dict[str, Any]]:
        return [self._tool(name) for name in self.random.sample(TOOLS, self.random.randint(1, 3))]

    def calls(self, tools: Sequence[Mapping[str, Any]], most: int) -> list[tuple[str, Any]]:
        chosen = [self.random.choice(tools) for _ in range(self.random.randint(1, most))]
        return [(tool["function"]["name"], self._arguments(tool)) for tool in chosen]

    def _tool(self, name: str) -> dict[str, Any]:
        names = self.random.sample(NAMES, self.random.randint(0, 5))
        properties = {n: self.random.choice(SCHEMAS) for n in names}
        parameters: dict[str, Any] = {
            "type": "object",
            "properties": properties,
            "$defs": {"text": {"type": "string"}},
            "required": [n for n in names if self.random.random() < 0.5],
        }
        if self.random.random() < 0.5:
            parameters["additionalProperties"] = False
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    def _arguments(self, tool: Mapping[str, Any]) -> dict[str, Any]:
        parameters = tool["function"]["parameters"]
        required = parameters["required"]
        given = [n for n in parameters["properties"] if n in required or self.random.random() < 0.6]
        self.random.shuffle(given)
        return {n: self._value(parameters["properties"][n]) for n in given}

    def _value(self, schema: Mapping[str, Any]) -> Any:
        kinds = schema.get("type") or [b.get("type", "string") for b in schema.get("anyOf", [{}])]
        kind = self.random.choice([kinds] if isinstance(kinds, str) else kinds)
        if "enum" in schema:
            return self.random.choice(schema["enum"])
        if schema.get("nullable") and self.random.random() < 0.3:
            return None
        makers: dict[str, Callable[[], Any]] = {
            "integer": lambda: self.random.choice((0, -1, 7, 2**53 + 1, 10**30)),
            "number": lambda: self.random.choice((0.1, -2.5e-7, 1e22, 3, 2**70)),
            "boolean": lambda: self.random.random() < 0.5,
            "null": lambda: None,
            "array": lambda: [self._item() for _ in range(self.random.randint(0, 3))],
            "object": lambda: {
                n: self._item() for n in self.random.sample(NAMES[:6], self.random.randint(0, 3))
            },
        }
        if kind in makers:
            return makers[kind]()
        text = self.text(self._pieces)
        if not isinstance(kinds, str) or schema.get("nullable"):
            text = f"~{text}"  # what may be another type must not look like one
        return text

    def _item(self) -> Any:
        return self.random.choice((self.text(self._nested), 5, True, None, [1, {"k": "v"}], {}))

    def text(self, pieces: Sequence[str], most: int = 12) -> str:
        return "".join(self.random.choices(pieces, k=self.random.randint(0, most)))


SCHEMAS: tuple[dict[str, Any], ...] = (
    *({"type": "string"},) * 6,
    {"$ref": "#/$defs/text"},
    {"type": "string", "enum": ["1", "null", "on"]},
    {"type": "string", "nullable": True},
    {"type": ["string", "null"]},
    {"anyOf": [{"type": "string"}, {"type": "integer"}]},
    {"type": "integer"},
    {"type": ["integer", "null"]},
    {"type": "number"},
    {"type": "boolean"},
    {"anyOf": [{"type": "array", "items": {}}, {"type": "null"}]},
    {"type": "object"},
    {"type": "array"},
)


class Pieced:
    """A tokenizer of one reply, whose tokens are given pieces.

    With `single`, the vocabulary has each marker as one token.
    """

    def __init__(self, family: Family, *, single: bool):
        self.has_thinking = False
        self.structural_markers: tuple[str, ...] = ()
        self.response_transitions: dict[str, Any] = {}
        self.response_initial_state = None
        self.unk_token_id = None
        self.tool_parser = self.tool_call_start = self.tool_call_end = None
        self._harmony = family.render is harmony
        self.eos_token_ids = {-7}
        if family.parser is not None:
            module = importlib.import_module(f"mlx_lm.tool_parsers.{family.parser}")
            self.tool_parser = module.parse_tool_call
            self.tool_call_start = module.tool_call_start
            self.tool_call_end = module.tool_call_end
        marks: tuple[Any, ...] = (self.tool_call_start, self.tool_call_end, *GENERIC)
        if self._harmony:
            marks = (*HARMONY, "<|call|>")
        self.ids = {m: n for n, m in enumerate(m for m in marks if m)} if single else {}
        self._texts = {n: mark for mark, n in self.ids.items()}

    def tokens(self, pieces: Sequence[str]) -> list[int]:
        """Ids of the pieces; those that are markers have the ids of the vocabulary."""
        ids = []
        for piece in pieces:
            token = self.ids.get(piece, len(self._texts) + 100)
            self._texts[token] = piece
            ids.append(token)
        return ids

    def cut(self, text: str, places: Sequence[int]) -> list[str]:
        """The text cut at places, and before and after each marker of the vocabulary."""
        found, within = set(places) | {0, len(text)}, set[int]()
        for mark in self.ids:
            at = text.find(mark)
            while at >= 0:
                found |= {at, at + len(mark)}
                within |= set(range(at + 1, at + len(mark)))
                at = text.find(mark, at + len(mark))
        ordered = sorted(found - within)
        return [text[a:b] for a, b in pairwise(ordered)]

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.ids[text]] if text in self.ids else [-2] * len(text)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return 90 if self._harmony and token in HARMONY else None

    @property
    def detokenizer(self) -> Any:
        return _Detokenizer(self._texts)


GENERIC = ("<tool_call>", "</tool_call>")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")


class _Detokenizer:
    def __init__(self, texts: Mapping[int, str]):
        self._texts = texts
        self.last_segment = ""

    def add_token(self, token: int) -> None:
        self.last_segment = self._texts[token]

    def finalize(self) -> None:
        self.last_segment = ""
