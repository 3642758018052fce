"""The ChatML template with tools of the built-in demo model, and the files that carry it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"

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
