"""Model families as exact replay meets them: a template, a tokenizer, and how the model writes.

The templates are as small as they can be, and do with thinking, calls and the ends of turns what
those of the families do.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tests.prompt.kinds import TEXT

Calls = Sequence[tuple[str, Mapping[str, Any]]]
Written = Callable[[str, str, Calls], str]
"""A reply as the model writes it: of its thinking, its text and its calls."""

LAST_QUERY = """\
{%- set ns = namespace(query=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.query = loop.index0 -%}{%- endif -%}
{%- endfor -%}"""
TOOLS = """\
{%- if tools -%}{{- '<|im_start|>system\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}{{- '<|im_end|>\n' -}}
{%- endif -%}"""
RESULT = """\
{%- elif m.role == 'tool' -%}
{%- if loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- else -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}"""

QWEN3 = (
    LAST_QUERY
    + TOOLS
    + """\
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.query and (loop.last or m.reasoning_content) -%}
{{- '<think>\n' + (m.reasoning_content or '').strip('\n') + '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content.lstrip('\n') -}}
{%- for tool_call in m.tool_calls or [] -%}
{%- if m.content or not loop.first -%}{{- '\n' -}}{%- endif -%}
{%- set tool_call = tool_call.function -%}
{{- '<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' -}}
{{- tool_call.arguments | tojson + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
"""
    + RESULT
    + """\
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\n\n</think>\n\n' -}}
{%- endif -%}
{%- endif -%}"""
)

QWEN35 = (
    LAST_QUERY
    + TOOLS
    + """\
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.query -%}
{{- '<think>\n' + (m.reasoning_content or '') | trim + '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content | trim -}}
{%- for call in m.tool_calls or [] -%}
{{- ('\n\n' if loop.first and m.content | trim else '\n' if not loop.first else '') -}}
{{- '<tool_call>\n<function=' + call.function.name + '>\n' -}}
{%- for key, value in call.function.arguments | items -%}
{{- '<parameter=' + key + '>\n' -}}
{{- (value if value is string else value | tojson) + '\n</parameter>\n' -}}
{%- endfor -%}
{{- '</function>\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
"""
    + RESULT
    + """\
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}"""
)

HARMONY = """\
{{- '<|start|>system<|message|>You are a model.<|end|>' -}}
{%- if tools -%}
{{- '<|start|>developer<|message|>' -}}
{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}{{- '<|end|>' -}}
{%- endif -%}
{%- set ns = namespace(final=-1, name='') -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and not m.tool_calls -%}{%- set ns.final = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and m.tool_calls -%}
{%- set call = m.tool_calls[0].function -%}
{%- set ns.name = call.name -%}
{%- if m.reasoning_content and loop.index0 > ns.final -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' -}}
{%- endif -%}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' -}}
{{- call.arguments | tojson + '<|call|>' -}}
{%- elif m.role == 'assistant' -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' -}}
{%- elif m.role == 'tool' -%}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' -}}
{{- m.content | tojson + '<|end|>' -}}
{%- else -%}
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""

GLM = (
    LAST_QUERY
    + """\
{{- '[gMASK]<sop>' -}}
{%- if tools -%}
{{- '<|system|>\n' -}}{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{- '<|user|>\n' + m.content -}}
{%- elif m.role == 'system' -%}{{- '<|system|>\n' + m.content -}}
{%- elif m.role == 'tool' -%}
{%- if loop.previtem.role != 'tool' -%}{{- '<|observation|>' -}}{%- endif -%}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- else -%}
{{- '<|assistant|>' -}}
{%- if loop.index0 > ns.query and m.reasoning_content -%}
{{- '\n<think>' + m.reasoning_content.strip() + '</think>' -}}
{%- else -%}{{- '\n<think></think>' -}}{%- endif -%}
{%- if m.content.strip() -%}{{- '\n' + m.content.strip() -}}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{- '\n<tool_call>' + call.function.name + '\n' -}}
{%- for key, value in call.function.arguments | items -%}
{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' -}}
{{- (value if value is string else value | tojson) + '</arg_value>\n' -}}
{%- endfor -%}
{{- '</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""
)

DEEPSEEK_R1 = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- m.content -}}{%- elif m.role == 'user' -%}
{{- '<｜User｜>' + m.content -}}
{%- else -%}
{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜><think>\n' -}}{%- endif -%}"""

MINIMAX = (
    LAST_QUERY
    + """\
{{- ']~!b[' -}}
{%- if tools -%}
{{- ']~b]system\n' -}}{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}
{{- '[e~[\n' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{{- ']~b]ai\n' -}}
{%- if m.reasoning_content and loop.index0 > ns.query -%}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content -}}
{%- if m.tool_calls -%}
{{- '\n<minimax:tool_call>\n' -}}
{%- for call in m.tool_calls -%}
{{- '<invoke name="' + call.function.name + '">\n' -}}
{%- for key, value in call.function.arguments | items -%}
{{- '<parameter name="' + key + '">' -}}
{{- (value if value is string else value | tojson) + '</parameter>\n' -}}
{%- endfor -%}
{{- '</invoke>\n' -}}
{%- endfor -%}
{{- '</minimax:tool_call>' -}}
{%- endif -%}
{{- '[e~[\n' -}}
{%- elif m.role == 'tool' -%}
{{- ']~b]tool\n<response>' + m.content + '</response>[e~[\n' -}}
{%- else -%}
{{- ']~b]' + m.role + '\n' + m.content + '[e~[\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- ']~b]ai\n<think>\n' -}}{%- endif -%}"""
)

LLAMA3 = """\
{{- bos_token -}}
{%- if tools -%}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\n' -}}{%- endfor -%}{{- '<|eot_id|>' -}}
{%- endif -%}
{%- for m in messages -%}
{%- if m.tool_calls -%}
{%- if m.tool_calls | length != 1 -%}{{- raise_exception('One call at a time.') -}}{%- endif -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' -}}
{{- m.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) -}}
{{- '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- endif -%}"""

GEMMA3 = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate') -}}
{%- endif -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' -}}
{{- m.content | trim + '<end_of_turn>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\n' -}}{%- endif -%}"""

MISTRAL = """\
{{- bos_token -}}
{%- if tools -%}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' -}}
{%- elif m.role == 'user' -%}{{- '[INST]' + m.content + '[/INST]' -}}
{%- elif m.role == 'tool' -%}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' -}}
{%- else -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson -}}
{%- endfor -%}
{{- eos_token -}}
{%- endif -%}
{%- endfor -%}"""


def tight(value: Any) -> str:
    """JSON as models often write it and templates do not."""
    return json.dumps(value, separators=(",", ": "), ensure_ascii=False)


def _json_calls(calls: Calls) -> str:
    blocks = (
        '<tool_call>\n{"name":"' + name + '", "arguments":' + tight(arguments) + "}\n</tool_call>"
        for name, arguments in calls
    )
    return "\n".join(blocks)


def _generic(calls: Calls) -> str:
    """As models are told to write calls whose template knows none."""
    return "\n".join(
        '<tool_call>{"name":"' + name + '","arguments":' + tight(arguments) + "}</tool_call>"
        for name, arguments in calls
    )


def _with(text: str, calls: str, between: str = "\n") -> str:
    return text + (between if text and calls else "") + calls


def qwen3(thinking: str, text: str, calls: Calls) -> str:
    return f"<think>\n{thinking}\n</think>\n\n" + _with(text, _json_calls(calls)) + "<|im_end|>"


def qwen35(thinking: str, text: str, calls: Calls) -> str:
    blocks = "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(
            f"<parameter={k}>\n{v if isinstance(v, str) else tight(v)}\n</parameter>\n"
            for k, v in arguments.items()
        )
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )
    return f"{thinking}\n</think>\n\n" + _with(text, blocks) + "<|im_end|>"


def harmony(thinking: str, text: str, calls: Calls) -> str:
    head = f"<|channel|>analysis<|message|>{thinking}<|end|><|start|>assistant"
    if not calls:
        return f"{head}<|channel|>final<|message|>{text}<|return|>"
    name, arguments = calls[0]
    to = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return head + to + tight(arguments) + "<|call|>"


def glm(thinking: str, text: str, calls: Calls) -> str:
    blocks = "\n".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>"
            f"{v if isinstance(v, str) else tight(v)}</arg_value>\n"
            for k, v in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )
    end = "<|observation|>" if calls else "<|user|>"
    return f"\n<think>{thinking}</think>\n" + _with(text, blocks) + end


def deepseek_r1(thinking: str, text: str, calls: Calls) -> str:
    return f"{thinking}\n</think>\n\n{_with(text, _generic(calls))}<｜end▁of▁sentence｜>"


def minimax(thinking: str, text: str, calls: Calls) -> str:
    blocks = "".join(
        f'<invoke name="{name}">\n'
        + "".join(
            f'<parameter name="{k}">{v if isinstance(v, str) else tight(v)}</parameter>\n'
            for k, v in arguments.items()
        )
        + "</invoke>\n"
        for name, arguments in calls
    )
    block = f"<minimax:tool_call>\n{blocks}</minimax:tool_call>" if calls else ""
    return f"{thinking}\n</think>\n\n" + _with(text, block, "\n\n") + "[e~["


def llama3(thinking: str, text: str, calls: Calls) -> str:
    return f"{_with(text, _generic(calls))} <|eot_id|>"


def gemma3(thinking: str, text: str, calls: Calls) -> str:
    return f"{_with(text, _generic(calls))}\n<end_of_turn>"


def mistral(thinking: str, text: str, calls: Calls) -> str:
    made = "".join(f"[TOOL_CALLS]{name}[ARGS]{tight(a)}" for name, a in calls)
    return f"{text}{made}</s>"


@dataclass(frozen=True, slots=True)
class Family:
    """`template` and its control tokens, `ends` among them; how the model `writes`; mlx-lm's
    `parser` of calls. `thinks`: it writes thinking. `several`: calls in a reply; `calls`: any that
    mlx-lm can read."""

    template: str
    writes: Written
    controls: tuple[str, ...]
    ends: tuple[str, ...]
    parser: str | None = None
    thinks: bool = True
    several: bool = True
    calls: bool = True


_CHATML = ("<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>")
_TOOL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_HARMONY = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
)
_HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_ARGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
_MINIMAX = ("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>")
_GEMMA = ("<bos>", "<start_of_turn>", "<end_of_turn>")
_MISTRAL = (
    "<s>",
    "</s>",
    *(f"[{slash}{name}]" for name in ("INST", "SYSTEM_PROMPT") for slash in ("", "/")),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[TOOL_CALLS]", "[ARGS]"),
)

FAMILIES = {
    "qwen3": Family(QWEN3, qwen3, (*_CHATML, *_THINK, *_TOOL), ("<|im_end|>",), "json_tools"),
    "qwen3.5": Family(QWEN35, qwen35, (*_CHATML, *_THINK, *_TOOL), ("<|im_end|>",), "qwen3_coder"),
    "gpt-oss": Family(HARMONY, harmony, _HARMONY, ("<|return|>", "<|call|>"), several=False),
    "glm": Family(
        GLM, glm, (*_GLM, *_THINK, *_TOOL, *_ARGS), ("<|user|>", "<|observation|>"), "glm47"
    ),
    "deepseek": Family(DEEPSEEK_R1, deepseek_r1, (*_DEEPSEEK, *_THINK), ("<｜end▁of▁sentence｜>",)),
    "minimax": Family(MINIMAX, minimax, (*_MINIMAX, *_THINK), ("[e~[",), "minimax_m2"),
    "llama3": Family(LLAMA3, llama3, _HEADERS, ("<|eot_id|>",), thinks=False, calls=False),
    "gemma3": Family(GEMMA3, gemma3, _GEMMA, ("<end_of_turn>",), thinks=False, several=False),
    "mistral": Family(MISTRAL, mistral, _MISTRAL, ("</s>",), "mistral", thinks=False),
}


@cache
def tokenizer(name: str) -> TokenizerWrapper:
    """The family's tokenizer as mlx-lm would wrap it, over a vocabulary of English and code."""
    family = FAMILIES[name]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    marks = (*_THINK, *_TOOL, *_ARGS, *_MINIMAX[3:])
    core.add_tokens(
        [AddedToken(c, normalized=False, special=c not in marks) for c in family.controls]
    )
    inner = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=family.controls[0],
        eos_token=family.ends[0],
        chat_template=family.template,
        clean_up_tokenization_spaces=False,
    )
    parser: dict[str, Any] = {}
    if family.parser is not None:
        module = importlib.import_module(f"mlx_lm.tool_parsers.{family.parser}")
        parser = {
            "tool_parser": module.parse_tool_call,
            "tool_call_start": module.tool_call_start,
            "tool_call_end": module.tool_call_end,
        }
    ends = [inner.convert_tokens_to_ids(end) for end in family.ends]
    return TokenizerWrapper(inner, BPEStreamingDetokenizer, eos_token_ids=ends, **parser)
