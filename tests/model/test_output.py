"""Parsing of tokens to text, thinking and tool calls."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import make_text_state_machine
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlxcache.model.markers import read_markers
from mlxcache.model.output import OutputParser
from mlxcache.types import Piece, Text, Thinking, ToolCall
from tests.model import tool_families

TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        },
    },
)
EOS = "<|im_end|>"


def byte_tokenizer(marks: Sequence[str], kind: str = "bpe") -> PreTrainedTokenizerFast:
    """A token for each byte, `EOS`, and one for each of `marks`."""
    if kind == "spm":
        vocab = {"<unk>": 0, "\u2581": 1} | {f"<0x{b:02X}>": b + 2 for b in range(256)}
        core = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        core.decoder = decoders.Sequence(
            [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.decoder = decoders.ByteLevel()
    core.add_tokens([AddedToken(m, normalized=False, special=False) for m in (EOS, *marks)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, clean_up_tokenization_spaces=False
    )


DETOKENIZERS: dict[str, Callable[..., Any]] = {
    "bpe": BPEStreamingDetokenizer,
    "naive": NaiveStreamingDetokenizer,
    "spm": lambda tokenizer: SPMStreamingDetokenizer(tokenizer, trim_space=False),
}


def wrapped(
    family: str | None = None, marks: Sequence[str] = (), kind: str = "bpe", **options: Any
) -> TokenizerWrapper:
    """A tokenizer as mlx-lm wraps it, with the tool parser of `family`."""
    if family is not None:
        module = importlib.import_module(f"mlx_lm.tool_parsers.{family}")
        options["tool_parser"] = module.parse_tool_call
        options["tool_call_start"] = module.tool_call_start
        options["tool_call_end"] = module.tool_call_end
    return TokenizerWrapper(byte_tokenizer(marks, kind), DETOKENIZERS[kind], **options)


def run(
    tokenizer: Any, reply: str | Sequence[int], reason: Any = "stop", **options: Any
) -> tuple[list[Piece], OutputParser]:
    """All pieces of a reply, a text or ids, and the parser that made them."""
    parser = OutputParser(tokenizer, **options)
    ids = tokenizer.encode(reply, add_special_tokens=False) if isinstance(reply, str) else reply
    pieces = [piece for token in ids for piece in parser.feed(token)]
    return joined(pieces + parser.finish(reason)), parser


def spelled_out(tokenizer: Any, text: str) -> list[int]:
    """Ids of each character alone, so that no marker is one token."""
    return [t for c in text for t in tokenizer.encode(c, add_special_tokens=False)]


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    out: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Text) and out and isinstance(out[-1], Text):
            out[-1] = Text(out[-1].text + piece.text)
        elif isinstance(piece, Thinking) and out and isinstance(out[-1], Thinking):
            out[-1] = Thinking(out[-1].text + piece.text)
        else:
            out.append(piece)
    return out


def call(pieces: Sequence[Piece], at: int = 0) -> tuple[str, Any]:
    (found,) = [p for p in pieces if isinstance(p, ToolCall) and p.index == at]
    return found.name, json.loads(found.arguments)


THINK = ("<think>", "</think>")
QWEN = (*THINK, "<tool_call>", "</tool_call>")
LOOK = '<tool_call>\n{"name": "look", "arguments": {"city": "Aix"}}\n</tool_call>'


@pytest.fixture(params=["one token", "spelled"])
def qwen(request: pytest.FixtureRequest) -> TokenizerWrapper:
    """A thinking model with JSON calls, its tool markers in the vocabulary or not."""
    return wrapped("json_tools", QWEN if request.param == "one token" else THINK)


# --- text -----------------------------------------------------------------------------------------


# mlx-lm's byte-level detokenizer spells the byte 0 as the letter that stands for it
SANE = st.characters(exclude_characters="\0", exclude_categories=["Cs"])


@settings(max_examples=60, deadline=None)
@given(st.text(SANE, max_size=40), st.sampled_from(["bpe", "naive", "spm"]))
def test_text_comes_out_as_it_was_encoded(text: str, kind: str) -> None:
    tokenizer = PLAIN[kind]
    # mlx-lm's byte-level detokenizer drops the space that a reply begins with
    prime = tokenizer.encode("x", add_special_tokens=False)
    pieces, _ = run(tokenizer, text, "length", prime=prime)
    assert pieces == ([Text(text)] if text else [])


PLAIN = {kind: wrapped(kind=kind) for kind in DETOKENIZERS}


@pytest.mark.parametrize("kind", list(DETOKENIZERS))
def test_a_character_cut_off_is_marked(kind: str) -> None:
    tokenizer = wrapped(kind=kind)
    parser = OutputParser(tokenizer)
    pieces: list[Piece] = []
    for token in tokenizer.encode("hi 🎉", add_special_tokens=False)[:-1]:
        pieces += parser.feed(token)
    assert all("\ufffd" not in p.text for p in pieces if isinstance(p, Text))
    text = joined(pieces + parser.finish("length"))[0]
    assert isinstance(text, Text)
    assert text.text.rstrip("\ufffd") == "hi "
    assert text.text.endswith("\ufffd")


def test_the_end_of_turn_is_never_text(qwen: TokenizerWrapper) -> None:
    pieces, parser = run(qwen, f"hello\n{EOS}more")
    assert (pieces, parser.done) == ([Text("hello\n")], "stop")
    assert parser.feed(0) == []
    assert parser.finish("length") == []
    assert parser.done == "stop"


def test_a_token_without_a_name_is_no_text() -> None:
    """Padded output heads can draw ids beyond the vocabulary."""
    tokenizer = wrapped(kind="spm")
    parser = OutputParser(tokenizer)
    pieces = [*parser.feed(10_000), *run_on(parser, tokenizer, "hi"), *parser.finish("length")]
    assert joined(pieces) == [Text("hi")]


def run_on(parser: OutputParser, tokenizer: Any, text: str) -> list[Piece]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [piece for token in ids for piece in parser.feed(token)]


def test_two_replies_at_once_do_not_mix(qwen: TokenizerWrapper) -> None:
    one, two = OutputParser(qwen), OutputParser(qwen)
    out: list[list[Piece]] = [[], []]
    for a, b in zip(qwen.encode("first é"), qwen.encode("other è"), strict=True):
        out[0] += one.feed(a)
        out[1] += two.feed(b)
    assert [joined(o) for o in out] == [[Text("first é")], [Text("other è")]]


# --- stop strings ---------------------------------------------------------------------------------


def test_a_stop_string_ends_the_text_and_is_not_in_it(qwen: TokenizerWrapper) -> None:
    """Also when its letters come in tokens of their own, and in thinking it is only text."""
    pieces, parser = run(qwen, "<think>STOP</think>one STOP two", stop=("STOP", "two"))
    assert pieces == [Thinking("STOP"), Text("one ")]
    assert (parser.done, parser.stop_sequence) == ("stop_sequence", "STOP")


def test_a_stop_string_half_written_is_let_out_at_the_end(qwen: TokenizerWrapper) -> None:
    pieces, parser = run(qwen, "one ST", "length", stop=("STOP",))
    assert (pieces, parser.done, parser.stop_sequence) == ([Text("one ST")], "length", None)


def test_a_stop_string_of_newlines_stops_a_completion(qwen: TokenizerWrapper) -> None:
    """Leading newlines are text where nobody thought before; after thinking they are framing."""
    pieces, parser = run(qwen, "\nrest", stop=("\n",))
    assert (pieces, parser.stop_sequence) == ([], "\n")
    pieces, parser = run(qwen, "<think>\na\n</think>\n\nb\nc", stop=("\n",))
    assert pieces == [Thinking("a"), Text("b")]


def test_a_stop_string_does_not_end_a_tool_call(qwen: TokenizerWrapper) -> None:
    pieces, parser = run(qwen, LOOK, stop=("Aix", "look"), tools=TOOLS)
    assert call(pieces) == ("look", {"city": "Aix"})
    assert parser.done == "tool_calls"


def test_a_stop_string_is_found_in_a_block_given_back(qwen: TokenizerWrapper) -> None:
    """Text that turned out to be visible is searched like any other, across its borders."""
    pieces, parser = run(qwen, "say <tool_call>x</tool_call>!", stop=("l>!",), tools=TOOLS)
    assert pieces == [Text("say <tool_call>x</tool_cal")]
    assert parser.stop_sequence == "l>!"


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_stop_string_in_a_call_that_was_cut_is_why_the_reply_ended(
    qwen: TokenizerWrapper, reason: Any
) -> None:
    """The block comes back as text at the end of the reply, and that is cut once more."""
    pieces, parser = run(qwen, "say <tool_call>x", reason, stop=("call",), tools=TOOLS)
    assert pieces == [Text("say <tool_")]
    assert (parser.done, parser.stop_sequence) == ("stop_sequence", "call")


def test_a_stop_string_is_not_found_across_a_call_or_thinking(qwen: TokenizerWrapper) -> None:
    pieces, parser = run(qwen, f"ST{LOOK}", stop=("ST<tool", "STOP"), tools=TOOLS)
    assert pieces[0] == Text("ST")
    assert call(pieces) == ("look", {"city": "Aix"})
    pieces, parser = run(qwen, "<think>ST</think>OP", stop=("STOP",))
    assert (pieces, parser.stop_sequence) == ([Thinking("ST"), Text("OP")], None)


# --- continued messages ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(DETOKENIZERS))
def test_the_rest_of_a_message_keeps_its_first_blanks(kind: str) -> None:
    """Also the space of the first token, which detokenizers drop where a text begins."""
    tokenizer = wrapped(kind=kind)
    prime = tokenizer.encode("Well,", add_special_tokens=False)
    pieces, _ = run(tokenizer, "  \nso", prime=prime, continued=True)
    assert pieces == [Text("  \nso")]


@pytest.mark.parametrize("kind", list(DETOKENIZERS))
def test_a_blank_at_the_end_of_a_prompt_is_not_in_the_reply(kind: str) -> None:
    tokenizer = wrapped(kind=kind)
    prime = tokenizer.encode("Well, ", add_special_tokens=False)
    for rest in ("so", " so", "\nso"):
        assert run(tokenizer, rest, prime=prime, plain=True)[0] == [Text(rest)]


def test_the_rest_of_a_message_may_call_and_stop(qwen: TokenizerWrapper) -> None:
    """It is like the rest of any reply; a blank before a call is part of the text."""
    prime = qwen.encode("x", add_special_tokens=False)
    pieces, _ = run(qwen, f" so\n{LOOK}", tools=TOOLS, continued=True, prime=prime)
    assert pieces[0] == Text(" so")
    assert call(pieces) == ("look", {"city": "Aix"})
    assert run(qwen, LOOK, tools=TOOLS, continued=True)[0][0] != Text("")
    pieces, parser = run(qwen, "\nSTOP", stop=("\nST",), continued=True)
    assert (pieces, parser.stop_sequence) == ([], "\nST")


def test_a_message_continued_in_its_thinking_thinks_on(qwen: TokenizerWrapper) -> None:
    pieces, _ = run(qwen, "hm\n</think>\n\nso", thinking_open=True, continued=True)
    assert pieces == [Thinking("hm"), Text("so")]


# --- thinking -------------------------------------------------------------------------------------


def test_thinking_is_apart_and_its_framing_gone(qwen: TokenizerWrapper) -> None:
    """Markers and the template's newlines are in neither; inner blank lines stay."""
    pieces, parser = run(qwen, "<think>\na\n\nb\n</think>\n\nhello\n\nyou")
    assert pieces == [Thinking("a\n\nb"), Text("hello\n\nyou")]
    assert parser.reasoning_tokens == len("\na\n\nb\n") + 1


def test_thinking_that_the_prompt_opened(qwen: TokenizerWrapper) -> None:
    pieces, parser = run(qwen, "a\n</think>\n\nhello", thinking_open=True)
    assert pieces == [Thinking("a"), Text("hello")]
    assert parser.reasoning_tokens == len("a\n") + 1


@pytest.mark.parametrize("inside", ["", "\n", "\n\n", "\n\n\n\n"])
def test_an_empty_block_is_no_thinking(qwen: TokenizerWrapper, inside: str) -> None:
    """Models that were told not to think write one."""
    pieces, _ = run(qwen, f"<think>{inside}</think>\n\nhello")
    assert pieces == [Text("hello")]


@pytest.mark.parametrize("reason", ["stop", "length", "repetition", "cancelled"])
def test_thinking_that_never_ends_is_kept(qwen: TokenizerWrapper, reason: Any) -> None:
    for end in ("\n", "\n</thi"):
        pieces, parser = run(qwen, f"<think>\na{end}", reason)
        assert (pieces, parser.done) == ([Thinking(f"a{end}")], reason)


def test_a_closing_marker_spelled_out_closes(qwen: TokenizerWrapper) -> None:
    pieces, _ = run(qwen, spelled_out(qwen, "a</think>b"), thinking_open=True)
    assert pieces == [Thinking("a"), Text("b")]


def test_text_about_think_markers_is_text(qwen: TokenizerWrapper) -> None:
    """In the middle of a reply only the token itself opens a block, not its spelling."""
    pieces, _ = run(qwen, spelled_out(qwen, "The <think> tag."))
    assert pieces == [Text("The <think> tag.")]
    pieces, _ = run(qwen, "One moment. <think>a</think>Two.")
    assert pieces == [Text("One moment. "), Thinking("a"), Text("Two.")]


def test_a_model_that_does_not_think_may_say_the_word() -> None:
    pieces, _ = run(wrapped(), "<think>a</think>")
    assert pieces == [Text("<think>a</think>")]


# --- tool calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["length", "cancelled"])
def test_a_reply_cut_in_its_second_call_says_so(qwen: TokenizerWrapper, reason: Any) -> None:
    cut = LOOK[: len(LOOK) // 2]
    pieces, parser = run(qwen, f"{LOOK}\n{cut}", reason, tools=TOOLS)
    assert [type(piece) for piece in pieces] == [ToolCall, Text]
    assert pieces[1] == Text(cut)
    assert parser.done == reason


def test_a_call_after_text(qwen: TokenizerWrapper) -> None:
    """One newline before it is the template's; the id is ours."""
    pieces, parser = run(qwen, f"Let me look.\n{LOOK}{EOS}", tools=TOOLS)
    text, found = pieces
    assert text == Text("Let me look.")
    assert isinstance(found, ToolCall)
    assert found.id.startswith("call_")
    assert len(found.id) == 29
    assert (found.index, found.name, found.arguments) == (0, "look", '{"city": "Aix"}')
    assert parser.done == "tool_calls"


@pytest.mark.parametrize(
    ("family", "begun"),
    [
        ("json_tools", '<tool_call>\n{"name": "look", "arguments": {"city": "x x x x x'),
        ("json_tools", '<tool_call>\n{"name": "look", "arguments": {"city": "x"}}\n\n\n\n\n'),
        ("qwen3_coder", "<tool_call>\n<function=look>\n<parameter=city>\nx x x x x"),
        ("glm47", "<tool_call>look<arg_key>city</arg_key><arg_value>x x x x x"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="look">\n<parameter name="city">x x x'),
        ("mistral", '[TOOL_CALLS]look[ARGS]{"city": "x x x x x'),
    ],
)
def test_a_loop_within_a_call_leaves_no_call(family: str, begun: str) -> None:
    """It is text, as at a limit; calls before it are whole, and are run."""
    pieces, parser = run(wrapped(family), begun, "repetition", tools=TOOLS)
    assert (pieces, parser.done) == ([Text(begun)], "repetition")
    pieces, parser = run(wrapped("json_tools"), f"{LOOK}\n\n\n\n", "repetition", tools=TOOLS)
    assert [type(p) for p in pieces] == [ToolCall]
    assert parser.done == "tool_calls"


def test_several_calls_in_one_turn(qwen: TokenizerWrapper) -> None:
    pieces, parser = run(qwen, f"\n\n{LOOK}\n{LOOK} \n{EOS}", tools=TOOLS)
    calls = [p for p in pieces if isinstance(p, ToolCall)]
    assert len(pieces) == len(calls) == 2
    assert [c.index for c in calls] == [0, 1]
    assert calls[0].id != calls[1].id
    assert parser.done == "tool_calls"


@pytest.mark.parametrize("more", ["\n<tool_response>sunny", "\n<think>done", " It is"])
def test_the_turn_ends_where_anything_but_a_call_follows(qwen: TokenizerWrapper, more: str) -> None:
    """The model would make up the result; its first letter ends the reply."""
    parser = OutputParser(qwen, tools=TOOLS)
    assert [type(p) for p in run_on(parser, qwen, LOOK + "\n<tool_ca")] == [ToolCall]
    assert parser.done is None
    parser = OutputParser(qwen, tools=TOOLS)
    assert [type(p) for p in run_on(parser, qwen, LOOK + more)] == [ToolCall]
    assert parser.done == "tool_calls"


def test_one_call_is_enough_where_the_client_wants_one(qwen: TokenizerWrapper) -> None:
    parser = OutputParser(qwen, tools=TOOLS, parallel_tools=False)
    assert [type(p) for p in run_on(parser, qwen, LOOK)] == [ToolCall]
    assert parser.done == "tool_calls"


def test_without_tools_a_call_is_text(qwen: TokenizerWrapper) -> None:
    for tools in (None, ()):
        pieces, parser = run(qwen, f"a\n{LOOK}", tools=tools)
        assert (pieces, parser.done) == ([Text(f"a\n{LOOK}")], "stop")


@pytest.mark.parametrize(
    "block",
    [
        "<tool_call>\nnot json\n</tool_call>",
        '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "look", "arguments": "no object"}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>[]</tool_call>",
        "<tool_call>7</tool_call>",
        "<tool_call>null</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>" + "[" * 3000 + "</tool_call>",
    ],
)
def test_a_malformed_call_comes_back_as_text(qwen: TokenizerWrapper, block: str) -> None:
    pieces, parser = run(qwen, f"a\n{block}\nb", tools=TOOLS)
    assert (pieces, parser.done) == ([Text(f"a\n{block}\nb")], "stop")


@pytest.mark.parametrize("reason", ["length", "cancelled"])
@pytest.mark.parametrize("keep", [5, 20, len(LOOK) - 1])
def test_a_call_cut_off_comes_back_as_text(qwen: TokenizerWrapper, reason: Any, keep: int) -> None:
    """A reply that ran into its limit must not run a tool with half the arguments."""
    text = f"a\n{LOOK[:keep]}"
    pieces, parser = run(qwen, spelled_out(qwen, text), reason, tools=TOOLS)
    assert (pieces, parser.done) == ([Text(text)], reason)


def test_a_call_without_its_closing_marker_counts_at_the_end_of_turn(
    qwen: TokenizerWrapper,
) -> None:
    """The model ended its turn, so the block is complete if it parses."""
    pieces, parser = run(qwen, LOOK.removesuffix("</tool_call>") + EOS, tools=TOOLS)
    assert call(pieces) == ("look", {"city": "Aix"})
    assert parser.done == "tool_calls"


def test_a_malformed_second_call_is_not_lost(qwen: TokenizerWrapper) -> None:
    pieces, parser = run(qwen, f"{LOOK}\n<tool_call>{{</tool_call>\n", tools=TOOLS)
    assert [type(p) for p in pieces] == [ToolCall, Text]
    assert pieces[1] == Text("<tool_call>{</tool_call>")
    assert parser.done == "tool_calls"


def test_a_closing_marker_inside_an_argument(qwen: TokenizerWrapper) -> None:
    """Spelled out in a file's text, or as the token itself, it does not end the block."""
    inner = "x</tool_call>y"
    body = json.dumps({"name": "look", "arguments": {"city": inner}})
    start, end = (qwen.encode(m, add_special_tokens=False) for m in ("<tool_call>", "</tool_call>"))
    for inside in (spelled_out(qwen, body), qwen.encode(body, add_special_tokens=False)):
        pieces, _ = run(qwen, [*start, *inside, *end], tools=TOOLS)
        assert call(pieces) == ("look", {"city": inner})


def test_a_call_within_thinking(qwen: TokenizerWrapper) -> None:
    """A model that forgot to close its block is understood; the thinking before it is kept."""
    pieces, parser = run(qwen, f"<think>\nhm\n{LOOK}", tools=TOOLS)
    assert pieces[0] == Thinking("hm")
    assert call(pieces) == ("look", {"city": "Aix"})
    assert parser.done == "tool_calls"


def test_a_malformed_call_within_thinking_stays_there(qwen: TokenizerWrapper) -> None:
    pieces, _ = run(qwen, "<think>a <tool_call> b</tool_call> c</think>d", tools=TOOLS)
    assert pieces == [Thinking("a <tool_call> b</tool_call> c"), Text("d")]


def test_thinking_about_calls_is_thinking() -> None:
    """Spelled out where the vocabulary has the token, or in a format that was never taught."""
    tokenizer = wrapped("json_tools", QWEN)
    pieces, _ = run(tokenizer, spelled_out(tokenizer, LOOK), tools=TOOLS, thinking_open=True)
    assert pieces == [Thinking(LOOK)]
    pieces, _ = run(
        wrapped(None, THINK), f"<think>{LOOK}</think>ok", tools=TOOLS, generic_tools=True
    )
    assert pieces == [Thinking(LOOK), Text("ok")]


def test_calls_that_were_never_taught() -> None:
    """A model without a tool format is told of one, and its vocabulary knows no markers."""
    pieces, parser = run(wrapped(), f"ok\n{LOOK}", tools=TOOLS, generic_tools=True)
    assert pieces[0] == Text("ok")
    assert call(pieces) == ("look", {"city": "Aix"})
    mistral = wrapped("mistral")
    pieces, parser = run(mistral, f"{LOOK} and so on", tools=TOOLS, generic_tools=True)
    assert (len(pieces), parser.done) == (1, "tool_calls")


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "look"}', {}),
        ('{"name": "look", "arguments": null}', {}),
        ('{"name": "look", "arguments": ""}', {}),
        ('{"name": "look", "arguments": "{\\"city\\": \\"Aix\\"}"}', {"city": "Aix"}),
        ('{"name": "look", "parameters": {"days": 2}}', {"days": 2}),
        ('{"type": "function", "function": {"name": "look", "arguments": {}}}', {}),
        ('{"name": " look ", "arguments": {"city": "é\\n\\ud83d\\ude00"}}', {"city": "é\n😀"}),
        ('{"name": "look", "arguments": {"city": "\\ud83d"}}', {"city": "\ud83d"}),
    ],
)
def test_spellings_of_a_call(qwen: TokenizerWrapper, body: str, arguments: Any) -> None:
    """What models make of the format; the arguments are always a JSON object that can be sent."""
    pieces, _ = run(qwen, f"<tool_call>{body}</tool_call>", tools=TOOLS)
    assert call(pieces) == ("look", arguments)
    (found,) = pieces
    assert isinstance(found, ToolCall)
    assert found.arguments.encode()


def test_a_call_of_an_unknown_tool_is_a_call(qwen: TokenizerWrapper) -> None:
    pieces, _ = run(qwen, LOOK.replace("look", "fly"), tools=TOOLS)
    assert call(pieces)[0] == "fly"


# --- families -------------------------------------------------------------------------------------

CALL = [("look", {"city": "Aix", "days": 2})]
FAMILIES = {f.parser: f.render(CALL) for f in tool_families.FAMILIES.values() if f.parser}
"""A call as each family's template writes it, by mlx-lm's parser."""


def markers_of(family: str) -> list[str]:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{family}")
    return [m for m in (module.tool_call_start, module.tool_call_end) if m]


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_well_formed_call_of_each_family(family: str, spelled: bool) -> None:
    tokenizer = wrapped(family, () if spelled else markers_of(family))
    pieces, parser = run(tokenizer, f"I look.\n{FAMILIES[family]}{EOS}", tools=TOOLS)
    assert pieces[0] == Text("I look.")
    assert len(pieces) == 2
    assert call(pieces) == ("look", {"city": "Aix", "days": 2})
    assert parser.done == "tool_calls"


@pytest.mark.parametrize("family", list(FAMILIES))
def test_each_family_without_tools(family: str) -> None:
    tokenizer = wrapped(family, markers_of(family))
    pieces, parser = run(tokenizer, f"a\n{FAMILIES[family]}{EOS}")
    assert (pieces, parser.done) == ([Text(f"a\n{FAMILIES[family]}")], "stop")


@pytest.mark.parametrize("family", list(FAMILIES))
def test_each_family_cut_off_anywhere(family: str) -> None:
    tokenizer = wrapped(family, markers_of(family))
    ids = tokenizer.encode(FAMILIES[family], add_special_tokens=False)
    for length in range(0, len(ids) + 1, 3):
        pieces, _ = run(tokenizer, ids[:length], "length", tools=TOOLS)
        if any(isinstance(p, ToolCall) for p in pieces):
            assert call(pieces) == ("look", {"city": "Aix", "days": 2})
            assert length > len(ids) - 3
        else:
            assert "".join(p.text for p in pieces if isinstance(p, Text)) == tokenizer.decode(
                ids[:length]
            )


@pytest.mark.parametrize("family", list(FAMILIES))
@settings(max_examples=25, deadline=None)
@given(junk=st.text(st.sampled_from('{}[]()<>"=:,/|\\ax1\n'), max_size=40))
def test_garbage_in_a_block_never_raises(family: str, junk: str) -> None:
    tokenizer = TOKENIZERS[family]
    start, *end = markers_of(family)
    block = start + junk + "".join(end)
    pieces, parser = run(tokenizer, block, tools=TOOLS)
    assert parser.done in ("stop", "tool_calls")
    for piece in pieces:
        if isinstance(piece, ToolCall):
            assert isinstance(json.loads(piece.arguments), dict)
            assert piece.name
    if parser.done == "stop":
        assert pieces == [Text(block)]


TOKENIZERS = {family: wrapped(family) for family in FAMILIES}


def test_several_calls_in_one_block() -> None:
    one = '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"city": "A"}'
    two = one.replace('"A"', '"B"')
    block = (
        f"<|tool_calls_section_begin|>{one}<|tool_call_end|>{two}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    )
    pieces, parser = run(wrapped("kimi_k2"), block, tools=TOOLS)
    ids = [p.id for p in pieces if isinstance(p, ToolCall)]
    assert ids[0] == "functions.look:0"
    assert len(set(ids)) == 2
    assert (call(pieces, 0)[1], call(pieces, 1)[1]) == ({"city": "A"}, {"city": "B"})
    pieces, parser = run(wrapped("kimi_k2"), block, tools=TOOLS, parallel_tools=False)
    assert (len(pieces), parser.done) == (1, "tool_calls")


def test_a_call_of_mistral_cut_off_is_text() -> None:
    """It has no closing marker: only parsing tells whether it is complete."""
    tokenizer = wrapped("mistral")
    text = '[TOOL_CALLS]look[ARGS]{"city": "A'
    pieces, parser = run(tokenizer, text, "length", tools=TOOLS)
    assert (pieces, parser.done) == ([Text(text)], "length")
    pieces, parser = run(tokenizer, text + 'ix"}', "length", tools=TOOLS)
    assert call(pieces) == ("look", {"city": "Aix"})


def test_prose_between_the_markers_of_glm_is_text() -> None:
    """Its parser makes a call out of anything."""
    for prose in ("is how a call begins", ""):
        block = f"<tool_call>{prose}</tool_call>"
        assert run(wrapped("glm47"), block, tools=TOOLS)[0] == [Text(block)]
    bare = ({"type": "function", "function": {"name": "look"}},)
    pieces, _ = run(wrapped("longcat"), FAMILIES["longcat"], tools=bare)
    assert call(pieces)[0] == "look"


MUSE = importlib.import_module("mlx_lm.chat_templates.muse_spark").RESPONSE_FORMAT
XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
CHANNEL = ("<|channel>", "<channel|>")


def test_a_channel_for_thought() -> None:
    tokenizer = wrapped("gemma4", (*CHANNEL, *markers_of("gemma4")))
    text = f"<|channel>thought\nhm\n<channel|>{FAMILIES['gemma4']}"
    pieces, _ = run(tokenizer, text, tools=TOOLS)
    assert pieces[0] == Thinking("hm")
    assert call(pieces) == ("look", {"city": "Aix", "days": 2})


def test_structural_markers_are_framing() -> None:
    tokenizer = wrapped("kimi_k3", XTML)
    text = (
        "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>Hello"
        "<|close|>response<|sep|><|close|>message<|sep|>"
    )
    assert run(tokenizer, text, tools=TOOLS)[0] == [Thinking("hm"), Text("Hello")]


def test_a_format_with_headers() -> None:
    """Muse Spark names the reader of each part first; a reply without a header is not lost."""
    tokenizer = wrapped("muse_spark", response_format=MUSE)
    text = " to=self<|message|>hm<|eom|> to=user<|message|>Hello<|eom|>"
    pieces, _ = run(tokenizer, text + FAMILIES["muse_spark"], tools=TOOLS)
    assert pieces[:2] == [Thinking("hm"), Text("Hello")]
    assert call(pieces) == ("look", {"city": "Aix", "days": 2})
    assert run(tokenizer, "Hello", tools=TOOLS)[0] == [Text("Hello")]
    for cut_off in (" to=us", "to=self<|message|>hm<|eom|><|start|>assistant to=us"):
        assert Text not in map(type, run(tokenizer, cut_off, "length")[0])
    block = FAMILIES["muse_spark"]
    pieces, _ = run(tokenizer, f"to=user<|message|>Hello<|eom|>to=look<|message|>{block}")
    assert pieces == [Text(f"Hello{block}")]


def edges_of_mlx_lm(tokenizer: TokenizerWrapper) -> dict[str, dict[str, str]]:
    """The edges inside mlx-lm's own state machine, read back from its tries."""

    def walk(node: dict[Any, Any]) -> list[tuple[str, int]]:
        found = []
        if "__match__" in node:
            pattern, index = node["__match__"]
            found.append(("".join(pattern), index))
        for key, child in node.items():
            if key not in ("__match__", "__fail__"):
                found += walk(child)
        return found

    states = make_text_state_machine(tokenizer)._states
    return {
        state: {pattern: targets[i] for pattern, i in walk(trie)}
        for state, (trie, targets) in states.items()
        if targets
    }


@pytest.mark.parametrize("marks", [(), THINK, CHANNEL, XTML], ids=str)
@pytest.mark.parametrize("family", [None, *FAMILIES])
def test_the_framing_is_that_of_mlx_lm(family: str | None, marks: Any) -> None:
    """Ours is kept as strings; the edges must be the same, or a new mlx-lm knows better."""
    form = MUSE if family == "muse_spark" else None
    tokenizer = wrapped(family, marks, response_format=form)
    ours = read_markers(tokenizer, tools=True, generic=False).edges
    assert {s: dict(e) for s, e in ours.items() if e} == edges_of_mlx_lm(tokenizer)


# --- any cut --------------------------------------------------------------------------------------


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({c % (len(text) + 1) for c in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]


class Chunks:
    def __init__(self, base: TokenizerWrapper, pieces: Sequence[str]):
        self._base, self._pieces = base, pieces
        self.eos_token_ids: set[int] = set()

    @property
    def detokenizer(self) -> Any:
        class Detokenizer:
            def add_token(inner, token: int) -> None:
                inner.last_segment = self._pieces[token]

            def finalize(inner) -> None:
                inner.last_segment = ""

            last_segment = ""

        return Detokenizer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


FRAGMENTS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", LOOK, '{"name": "look"}', "</"),
    *("think>", "<", "a", "\n", "\n\n", " ", "stop", "st", "op", "é"),
)
replies = st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
BASE = wrapped("json_tools")
THINKER = wrapped("json_tools", THINK)


FRAMED = {
    "think": (wrapped("json_tools", THINK), FRAGMENTS),
    "headers": (
        wrapped("muse_spark", response_format=MUSE),
        (
            *(" to=self<|message|>", "to=user", "<|message|>", "<|eom|>", "<|eot|>", "a\n", "stop"),
            *("<atem:function_calls>", "</atem:function_calls>", FAMILIES["muse_spark"], "to=se"),
        ),
    ),
    "gpt-oss": (
        wrapped(None, ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>")),
        (
            *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>", "<|c"),
            *("<|start|>", "assistant", "<|message|>", " to=look", "{}", "<|call|>", "a\n", "stop"),
        ),
    ),
}


@pytest.mark.parametrize("framing", list(FRAMED))
@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    cuts=st.lists(st.integers(0, 200), max_size=20),
    stop=st.lists(st.sampled_from(["stop", "st", "a\n", "\n", "op<", "</think>"]), max_size=2),
    thinking_open=st.booleans(),
    tools=st.sampled_from([None, TOOLS]),
    parallel_tools=st.booleans(),
    reason=st.sampled_from(["stop", "length", "cancelled"]),
)
def test_the_cut_into_tokens_changes_nothing(
    framing: str, data: st.DataObject, cuts: list[int], reason: Any, **options: Any
) -> None:
    tokenizer, fragments = FRAMED[framing]
    text = "".join(data.draw(st.lists(st.sampled_from(fragments), max_size=12)))
    results = []
    for split in (cut(text, cuts), [text], list(text)):
        out, parser = run(Spelled(tokenizer, split), range(len(split)), reason, **options)
        results.append((without_ids(out), parser.done, parser.stop_sequence))
    assert results[0] == results[1] == results[2]


class Spelled(Chunks):
    def encode(self, text: str, **_: Any) -> list[int]:
        return [-2] * len(text)


def without_ids(pieces: Sequence[Piece]) -> list[Any]:
    return [
        (p.index, p.name, p.arguments) if isinstance(p, ToolCall) else p for p in joined(pieces)
    ]


@settings(max_examples=200, deadline=None)
@given(text=replies, cuts=st.lists(st.integers(0, 200), max_size=20))
def test_pieces_put_together_are_the_reply(text: str, cuts: list[int]) -> None:
    """Without stops and tools nothing is lost or moved but what markers and blanks are made of."""
    split = cut(text, cuts)
    out, _ = run(Spelled(THINKER, split), range(len(split)), "length")
    said = "".join(p.text for p in out if isinstance(p, Text | Thinking))
    framing = str.maketrans("", "", "</think>\n ")
    assert said.translate(framing) == text.translate(framing)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abs\n ", max_size=40),
    cuts=st.lists(st.integers(0, 200), max_size=20),
    stop=st.lists(st.text("abs\n ", min_size=1, max_size=4), max_size=4),
)
def test_streamed_text_stops_where_a_search_finds_the_stop(
    text: str, cuts: list[int], stop: list[str]
) -> None:
    """The reference looks at the whole text: the shortest prefix that ends in a stop string."""
    split = cut(text, cuts)
    out, parser = run(Chunks(BASE, split), range(len(split)), "length", stop=stop)
    expected, found = text, None
    for end in range(1, len(text) + 1):
        ends = [s for s in stop if text[:end].endswith(s)]
        if ends:
            found = max(ends, key=len)
            expected = text[: end - len(found)]
            break
    assert "".join(p.text for p in out if isinstance(p, Text)) == expected
    assert parser.stop_sequence == found
    assert parser.done == ("length" if found is None else "stop_sequence")


# --- gpt-oss --------------------------------------------------------------------------------------

HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
COMMENTARY = (
    "<|channel|>commentary to=functions.look <|constrain|>json<|message|>"
    '{"city": "Aix", "days": 2}<|call|>'
)


@pytest.fixture(scope="module")
def oss() -> TokenizerWrapper:
    """gpt-oss's own tokens, in a tokenizer that mlx-lm knows no framing for."""
    return wrapped(None, HARMONY)


def test_channels_are_thinking_and_text(oss: TokenizerWrapper) -> None:
    pieces, parser = run(oss, f"{ANALYSIS}<|channel|>final<|message|>Hello{EOS}")
    assert pieces == [Thinking("hm"), Text("Hello")]
    assert (parser.done, parser.reasoning_tokens) == ("stop", 3)


@pytest.mark.parametrize("call_ends_turn", [True, False])
def test_a_message_with_a_recipient_is_a_call(call_ends_turn: bool) -> None:
    """Whether <|call|> ends the turn by the model's files or is followed by more."""
    tokenizer = wrapped(None, HARMONY)
    if call_ends_turn:
        tokenizer.add_eos_token("<|call|>")
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    text = ANALYSIS + preamble + COMMENTARY
    pieces, parser = run(tokenizer, text + EOS, tools=TOOLS)
    assert pieces[:2] == [Thinking("hm"), Text("I look.")]
    assert call(pieces) == ("look", {"city": "Aix", "days": 2})
    assert parser.done == "tool_calls"
    bare = COMMENTARY.replace('{"city": "Aix", "days": 2}', "")
    assert call(run(tokenizer, bare, tools=TOOLS)[0]) == ("look", {})
    role = COMMENTARY.replace(" to=functions.look", "").replace(
        "<|channel|>", " to=look<|channel|>"
    )
    pieces, _ = run(tokenizer, ANALYSIS + role, tools=TOOLS)
    assert call(pieces) == ("look", {"city": "Aix", "days": 2})


def test_two_calls_of_gpt_oss(oss: TokenizerWrapper) -> None:
    more = f"{COMMENTARY}<|start|>assistant{COMMENTARY}<|start|>assistant{ANALYSIS}"
    pieces, parser = run(oss, more, tools=TOOLS)
    assert [type(p) for p in pieces] == [ToolCall, ToolCall]
    assert parser.done == "tool_calls"


def test_a_call_of_gpt_oss_without_tools_or_sense_is_text(oss: TokenizerWrapper) -> None:
    assert run(oss, COMMENTARY)[0] == [Text(COMMENTARY)]
    broken = COMMENTARY.replace("}", "")
    pieces, parser = run(oss, ANALYSIS + broken, tools=TOOLS)
    assert pieces == [Thinking("hm"), Text("<|start|>assistant" + broken)]
    assert parser.done == "stop"


@pytest.mark.parametrize("keep", range(0, len("<|channel|>final<|mes"), 4))
def test_a_header_cut_off_is_not_text(oss: TokenizerWrapper, keep: int) -> None:
    header = "<|channel|>final<|mes"[:keep]
    assert run(oss, ANALYSIS + header, "length")[0] == [Thinking("hm")]


@pytest.mark.parametrize("text", ["final", "analysis of it", " to=look it"])
def test_the_rest_of_a_message_has_no_header(oss: TokenizerWrapper, text: str) -> None:
    prime = oss.encode("x", add_special_tokens=False)
    parser = OutputParser(oss, continued=True, prime=prime)
    assert joined(run_on(parser, oss, text)) == [Text(text)]
    pieces, _ = run(oss, f"{text}<|end|><|start|>assistant{ANALYSIS}", continued=True, prime=prime)
    assert pieces == [Text(text), Thinking("hm")]


def test_a_reply_without_a_header_is_text_at_once(oss: TokenizerWrapper) -> None:
    parser = OutputParser(oss, stop=("two",))
    pieces = run_on(parser, oss, "one <|message|> t")
    assert joined(pieces) == [Text("one <|message|> ")]
    assert run_on(parser, oss, "wo") == []
    assert parser.stop_sequence == "two"


def test_text_about_the_format_is_text(oss: TokenizerWrapper) -> None:
    ids = oss.encode(f"{ANALYSIS}<|channel|>final<|message|>", add_special_tokens=False)
    pieces, _ = run(oss, [*ids, *spelled_out(oss, "the <|end|> token")])
    assert pieces == [Thinking("hm"), Text("the <|end|> token")]


def test_gpt_oss_told_of_another_format(oss: TokenizerWrapper) -> None:
    text = f"{ANALYSIS}<|channel|>final<|message|>{LOOK}"
    pieces, _ = run(oss, text, tools=TOOLS, generic_tools=True)
    assert call(pieces) == ("look", {"city": "Aix"})


@pytest.mark.parametrize("opened", [False, True])
def test_a_plain_completion_is_text_and_nothing_else(qwen: TokenizerWrapper, opened: bool) -> None:
    """Markers of thinking and calls are part of a raw completion's text, wherever it begins."""
    text = "<think>so</think> then <tool_call>{}</tool_call>"
    tools = ({"name": "f"},)
    pieces, _ = run(qwen, text, "length", tools=tools, plain=True, thinking_open=opened)
    assert pieces == [Text(text)]
