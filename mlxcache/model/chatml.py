"""A byte-level BPE tokenizer and a ChatML template with tools, for models made on the spot.

The text it is trained on is what any Python installation has: the language reference behind
`help()`, and the standard library's own sources.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from pydoc_data import topics
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CONTROL = (END_OF_TEXT, TURN_START, TURN_END)
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINK_MARKS = ("<think>", "</think>")

TEMPLATE = """\
{%- set ns = namespace(query=-1, first=0) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages and messages[0].role in ['system', 'developer'] -%}
{%- set ns.first = 1 -%}
{{- messages[0].content + '\\n\\n' -}}
{%- endif -%}
{{- '# Tools\\n\\nThese are the tools, one JSON object per line:\\n<tools>\\n' -}}
{%- for tool in tools -%}{{- (tool | tojson) + '\\n' -}}{%- endfor -%}
{{- '</tools>\\n\\nTo use one, write its name and its arguments so:\\n' -}}
{{- '<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[ns.first:] -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content -}}
{{- '\\n</tool_response><|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if THINKS and loop.index0 + ns.first > ns.query -%}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- message.content or '' -}}
{%- for call in message.tool_calls or [] -%}
{%- set tool_call = call.function or call -%}
{%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' -}}
{%- if tool_call.arguments is string -%}{{- tool_call.arguments -}}
{%- else -%}{{- tool_call.arguments | tojson -}}{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}
{%- set role = 'system' if message.role == 'developer' else message.role -%}
{{- '<|im_start|>' + role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if THINKS -%}
{{- '<think>\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
{%- endif -%}
"""


def template(*, thinking: bool) -> str:
    """The Jinja source of the chat template.

    System and developer turns stay where they are; only one at the very start shares its turn
    with the tools. With `thinking`, a reply is prompted inside an open think block (closed at
    once where `enable_thinking` is false), and the reasoning of replies before the last user
    message is left out, as reasoning models' templates do.
    """
    return TEMPLATE.replace("THINKS", "true" if thinking else "false")


def reference_texts() -> Iterator[str]:
    """The Python language reference by topic: about 450 kB of English."""
    for name in sorted(topics.topics):
        yield topics.topics[name]


def library_sources() -> Iterator[str]:
    """The source text of the standard library's top-level modules: about 4.5 MB."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, thinking: bool) -> Tokenizer:
    """A byte-level BPE over `texts`, of at most `vocab_size` tokens with the special ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = MARKS + (THINK_MARKS if thinking else ())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(marks),
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(mark, normalized=False, special=False) for mark in marks])
    return tokenizer


@lru_cache(maxsize=8)
def toy_tokenizer(vocab_size: int, thinking: bool) -> str:
    """The tokenizer.json of a toy; the larger vocabularies also learn from sources. Seconds."""
    texts = list(reference_texts())
    if vocab_size > 8192:
        texts += library_sources()
    return train_tokenizer(texts, vocab_size, thinking=thinking).to_str()


def write_tokenizer(directory: Path, tokenizer: str, *, context: int, thinking: bool) -> None:
    """Write tokenizer.json and tokenizer_config.json as `transformers` reads them."""
    (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        "chat_template": template(thinking=thinking),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
