"""Real servers, each started when first asked for and kept to the session's end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import anthropic
import openai
import pytest

from tests.conftest import ToyMaker
from tests.forked import served
from tests.server.api import Api

Start = Callable[..., Api]

ENCODES_ANEW = ("--canonicalise", "replay=off")
"""For tests that compare with mlx-lm, which knows only the text of earlier replies."""

STRICT = """\
{%- if messages[0].role == 'system' -%}
{{- raise_exception('System role not supported') -}}
{%- endif -%}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Roles must alternate user/assistant/user/assistant') -}}
{%- endif -%}
{%- set role = 'model' if m.role == 'assistant' else m.role -%}
{{- '<|im_start|>' + role + '\\n' + m.content | trim + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>model\\n' -}}{%- endif -%}"""
"""A template like Gemma's: user and assistant in turn, no system role, no tools."""


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """`start(name, model, *flags)` is the server of that name, started at its first use."""
    running: dict[str, Api] = {}
    with ExitStack() as stack:

        def get(name: str, model: Path, *flags: str) -> Api:
            if name not in running:
                home = tmp_path_factory.mktemp("home")
                arguments = ("--model", str(model), "--ram", "200MB", *flags)
                running[name] = Api(stack.enter_context(served(*arguments, home=home)))
            return running[name]

        yield get


@pytest.fixture(scope="session")
def llama(start: Start, toy: ToyMaker) -> Api:
    """The server that most tests share."""
    return start("llama", toy("llama"), "--prefill-chunk", "256", *ENCODES_ANEW)


@pytest.fixture(scope="session")
def queueing(start: Start, toy: ToyMaker) -> Api:
    """A server of the same model, one request at a time, two of which may wait."""
    return start("queueing", toy("llama"), "--concurrency", "1", "--queue", "2")


@pytest.fixture(scope="session")
def thinking(start: Start, toy: ToyMaker) -> Api:
    """A model that reasons a little, answers, and ends its turn."""
    emits = {"<|im_end|>": 40, "</think>": 12}
    return start("thinking", toy("llama", thinking=True, emits=emits))


@pytest.fixture(scope="session")
def quoting(start: Start, toy: ToyMaker) -> Api:
    """A model that writes a quote now and then, so that its strings end, and ends its turns."""
    return start("quoting", toy("llama", emits={'"': 8, "<|im_end|>": 30}))


@pytest.fixture
def sdk(quoting: Api) -> openai.OpenAI:
    """OpenAI's SDK on `quoting`."""
    return openai.OpenAI(base_url=f"{quoting.url}/v1", api_key="any", max_retries=0)


@pytest.fixture
def claude(quoting: Api) -> anthropic.Anthropic:
    """Anthropic's SDK on `quoting`."""
    return anthropic.Anthropic(base_url=quoting.url, api_key="any", max_retries=0)


@pytest.fixture(scope="session")
def strict(start: Start, toy: ToyMaker) -> Api:
    """A small context, and a template that refuses system messages and knows no tools."""
    model = toy("llama", emits={"<|im_end|>": 20})
    config = model / "tokenizer_config.json"
    fields = json.loads(config.read_text(encoding="utf-8")) | {"chat_template": STRICT}
    config.write_text(json.dumps(fields), encoding="utf-8")
    return start("strict", model, "--context", "1000", "--max-tokens", "9")
