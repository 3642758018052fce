"""Chat templates in the manner of model families, as small as they can be."""

CHATML = """\
{%- if tools -%}
{{- '<|im_start|>system\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\n' -}}{%- endif -%}
{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' and loop.first and tools -%}
{%- elif m.role == 'tool' -%}
{%- if loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' and m.reasoning_content is string and KEEP -%}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\n\n</think>\n\n' -}}
{%- elif OPEN -%}
{{- '<think>\n' -}}
{%- endif -%}
{%- endif -%}"""


def chatml(*, keep: str = "false", thinks: str = "false") -> str:
    """Tools in the first system turn, results as user turns; `keep` when reasoning stays."""
    return CHATML.replace("KEEP", keep).replace("OPEN", thinks)


QWEN3 = chatml(keep="loop.index0 > namespace(last=messages | length - 2).last")
"""Reasoning is dropped from all but the last message."""

STRICT_SYSTEM = (
    "{%- for m in messages -%}{%- if m.role == 'system' and not loop.first -%}"
    "{{- raise_exception('System message must come first.') -}}{%- endif -%}{%- endfor -%}"
) + chatml()
"""A system message anywhere but first is refused."""

HOISTS = (
    "{%- for m in messages if m.role == 'system' -%}"
    "{{- '<|im_start|>system\n' + m.content + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- for m in messages if m.role != 'system' -%}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
"""Every system message goes to the top, as the worst of templates do; no tools."""

LLAMA3 = """\
{{- bos_token -}}
{%- if tools -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\n' -}}{%- endif -%}
{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}{{- '<|eot_id|>' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' and loop.first and tools -%}
{%- elif m.tool_calls -%}
{%- if m.tool_calls | length != 1 -%}{{- raise_exception('One call at a time.') -}}{%- endif -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' -}}
{{- m.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' -}}
{%- elif m.role == 'tool' -%}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- endif -%}"""
"""One call a message, whose text is dropped beside it; tools in the system turn."""

GEMMA = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role not in ['user', 'assistant'] -%}
{{- raise_exception(m.role + ' role not supported') -}}
{%- endif -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate') -}}
{%- endif -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' -}}
{{- m.content | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}"""
"""User and assistant only, strictly in turn."""

MISTRAL = """\
{{- bos_token -}}
{%- set ns = namespace(turn=0) -%}
{%- if tools -%}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}
{%- if not loop.first -%}{{- raise_exception('System first.') -}}{%- endif -%}
{{- '[INST] ' + m.content + '[/INST]' -}}
{%- elif m.role == 'tool' -%}
{{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + '}[/TOOL_RESULTS]' -}}
{%- elif m.tool_calls -%}
{%- for call in m.tool_calls -%}
{%- if call.id | length != 9 -%}{{- raise_exception('Ids have nine letters.') -}}{%- endif -%}
{%- endfor -%}
{{- '[TOOL_CALLS] [' -}}
{%- for call in m.tool_calls -%}
{{- '{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson + ', "id": "' + call.id + '"}' -}}
{%- endfor -%}
{{- ']' + eos_token -}}
{%- else -%}
{%- if (m.role == 'user') != (ns.turn % 2 == 0) -%}
{{- raise_exception('Roles must alternate.') -}}
{%- endif -%}
{%- set ns.turn = ns.turn + 1 -%}
{{- '[INST] ' + m.content + '[/INST]' if m.role == 'user' else ' ' + m.content + eos_token -}}
{%- endif -%}
{%- endfor -%}"""
"""No generation prompt, ids of nine letters, no user message after a result."""

STRINGS = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' + (m.content if m.content else '') -}}
{%- if m.content is undefined -%}
{%- for call in m.tool_calls -%}
{{- '<tool_call>' + call.function.name + '\n' + call.function.arguments + '</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- for tool in tools or [] -%}{{- tool.function.name + tool | tojson -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""
"""Arguments must be text, and a message with calls have no content at all."""
