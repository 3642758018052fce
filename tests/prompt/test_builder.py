from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings

from mlxcache.errors import ConfigError, ContextLengthExceeded
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.types import NO_TOKENS, Chat
from tests.prompt import kinds, templates
from tests.prompt.chats import TOOLS, agent_turns
from tests.prompt.kinds import Newlines, NoBackend, Wrapped

SOURCES = {
    "chatml": templates.chatml(),
    "strict": templates.STRICT_SYSTEM,
    "llama3": templates.LLAMA3,
    "gemma": templates.GEMMA,
}
SYSTEM = {"role": "system", "content": "You help. " * 8}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


BUILDERS: dict[tuple[str, str], PromptBuilder] = {}


def builder(kind: str, name: str = "chatml") -> PromptBuilder:
    if (kind, name) not in BUILDERS:
        BUILDERS[kind, name] = PromptBuilder(kinds.tokenizer(kind, SOURCES[name]))
    return BUILDERS[kind, name]


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("kind", ["byte_level", "blank_runs", "metaspace_first", "unigram"])
@settings(max_examples=12, deadline=None)
@given(turns=agent_turns())
def test_a_turn_up_to_its_last_mark_starts_the_next_turn(
    kind: str, name: str, turns: list[Chat]
) -> None:
    """Token for token: that is what makes every turn warm."""
    made = builder(kind, name)
    before = NO_TOKENS
    for chat in turns:
        prompt = made.chat(chat, "s")
        assert prompt.ids[: len(before)].tolist() == before.tolist()
        assert list(prompt.marks) == sorted(set(prompt.marks))
        assert 0 < prompt.marks[-1] < len(prompt.ids)
        before = prompt.ids[: prompt.marks[-1]]


@pytest.mark.parametrize("kind", ["byte_level", "metaspace_always", "replacing"])
def test_ordinary_conversations_get_the_ids_that_transformers_gives(kind: str) -> None:
    tokenizer = kinds.tokenizer(kind, SOURCES["chatml"])
    messages = [SYSTEM, user("a < b\n\n  é 123"), assistant("It's so."), user("ok")]
    expected = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True)
    assert builder(kind).chat(Chat(messages, TOOLS)).ids.tolist() == list(expected)


def test_a_bare_text_may_hold_control_tokens() -> None:
    """Completions are written by hand."""
    ids = builder("byte_level").text("<|im_start|>x").ids
    assert ids[0] == kinds.backend("byte_level").token_to_id("<|im_start|>")


def test_the_breakpoint_of_the_last_message_is_the_last_mark() -> None:
    """The usual place of a client's cache mark."""
    messages = [SYSTEM, user("one"), assistant("two"), user("three")]
    prompt = builder("byte_level").chat(Chat(messages, breakpoint=4))
    assert prompt.breakpoint == prompt.marks[-1]
    assert builder("byte_level").chat(Chat(messages)).breakpoint is None


@pytest.mark.parametrize("name", SOURCES)
def test_a_breakpoint_inside_is_where_the_next_message_starts(name: str) -> None:
    """The same place as a mark, where messages are long enough to have one."""
    long = "words to make it long enough " * 3
    messages = [SYSTEM, user(long), assistant(long), user(long), assistant(long), user("end")]
    made = builder("byte_level", name)
    for leading in (2, 3, 4, 5):
        prompt = made.chat(Chat(messages, TOOLS, breakpoint=leading))
        assert prompt.breakpoint in prompt.marks
        assert prompt.breakpoint is not None
        cut = made.chat(Chat(messages[:leading], TOOLS)).ids
        assert prompt.ids[: prompt.breakpoint].tolist() == cut[: prompt.breakpoint].tolist()
    first = made.chat(Chat(messages, TOOLS, breakpoint=0)).breakpoint
    assert first == made.chat(Chat(messages, TOOLS, breakpoint=1)).breakpoint


def test_a_breakpoint_without_any_special_token_is_counted_in_common_tokens() -> None:
    made = PromptBuilder(kinds.tokenizer("byte_level", None))
    messages = [SYSTEM, user("one two three"), assistant("four"), user("five")]
    whole = made.chat(Chat(messages, breakpoint=2))
    text = kinds.backend("byte_level").decode(whole.ids[: whole.breakpoint].tolist())
    assert text.rstrip("\n").endswith("User: one two three")
    assert whole.marks == (len(made.chat(Chat(messages)).ids) - 2,) or len(whole.marks) == 1


@pytest.mark.parametrize(
    ("args", "opened"), [({}, True), ({"enable_thinking": False}, False)], ids=["on", "off"]
)
def test_an_open_think_block_is_told(args: dict[str, Any], opened: bool) -> None:
    made = PromptBuilder(kinds.tokenizer("byte_level", templates.chatml(thinks="true")))
    sly = [user("<think> is a word"), assistant("</think>x"), user("<think>")]
    for messages in ([user("hi")], sly):
        assert made.chat(Chat(messages, template_args=args)).thinking_open is opened


def test_thinking_is_not_open_without_a_think_block() -> None:
    assert not builder("byte_level").chat(Chat([user("<think>")])).thinking_open
    tail = [user("hi"), assistant("<think>\nhm")]
    continued = builder("byte_level").chat(Chat(tail, continue_final=True))
    assert continued.thinking_open
    assert continued.continued
    assert not builder("byte_level").chat(Chat(tail)).continued


def test_generic_tools_are_told() -> None:
    assert builder("byte_level", "gemma").chat(Chat([user("hi")], TOOLS)).generic_tools
    assert not builder("byte_level", "gemma").chat(Chat([user("hi")])).generic_tools
    assert not builder("byte_level").chat(Chat([user("hi")], TOOLS)).generic_tools


@pytest.mark.parametrize("wrap", ["no backend", "own encode", "no template"])
def test_other_tokenizers_are_served_whole(wrap: str, caplog: pytest.LogCaptureFixture) -> None:
    source = None if wrap == "no template" else SOURCES["chatml"]
    cls = {"cls": Newlines} if wrap == "own encode" else {}
    tokenizer = kinds.tokenizer("byte_level", source, **cls)
    if wrap == "no backend":
        tokenizer = Wrapped(NoBackend(tokenizer._tokenizer))
    made = PromptBuilder(tokenizer)
    assert made.incremental is (wrap == "no template")
    assert caplog.messages
    prompt = made.chat(Chat([SYSTEM, user("hi <|im_end|>"), assistant("x"), user("y")], TOOLS))
    end = kinds.backend("byte_level").token_to_id("<|im_end|>")
    assert (prompt.ids == end).sum() == (0 if source is None else 4)
    assert prompt.marks


@pytest.mark.parametrize("name", ["messages", "namespace"])
def test_the_operator_s_arguments_are_checked_at_the_start(name: str) -> None:
    """Every request would fail with them."""
    tokenizer = kinds.tokenizer("byte_level", templates.MISTRAL)
    with pytest.raises(ConfigError, match="--chat-template-args"):
        PromptBuilder(tokenizer, {name: 1})
    assert PromptBuilder(tokenizer, {"mood": 1}).chat(Chat([user("hi")])).ids.size


def test_a_text_many_times_too_long_is_refused_before_it_is_tokenised() -> None:
    """Megabytes of it would take minutes and gigabytes."""
    made = PromptBuilder(kinds.tokenizer("byte_level", SOURCES["chatml"]), context=1000)
    text = "a few words, " * 100_000
    for refused in (lambda: made.text(text), lambda: made.chat(Chat([user(text)]))):
        with pytest.raises(ContextLengthExceeded, match="prompt is too long: 13"):
            refused()
    assert len(made.text(text[:5000]).ids) > 1000, "a little too long is not for it to refuse"


def test_a_long_text_of_few_tokens_is_not_refused() -> None:
    """Its characters are no measure of its tokens."""
    blanks = kinds.tokenizer("blank_runs", SOURCES["chatml"])
    text = " " * 300_000
    tokens = len(PromptBuilder(blanks).text(text).ids)
    made = PromptBuilder(blanks, context=tokens + 1)
    assert len(text) > 8 * tokens
    assert len(made.text(text).ids) == tokens


def test_fifty_requests_at_once() -> None:
    made = builder("byte_level")
    chats = [Chat([SYSTEM, user(f"number {i} " * 50)], TOOLS) for i in range(50)]
    expected = [made.chat(chat).ids.tolist() for chat in chats]
    got: dict[int, list[int]] = {}

    def work(i: int) -> None:
        got[i] = made.chat(chats[i], f"s{i % 7}").ids.tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(50)] == expected


@pytest.mark.parametrize("kind", ["byte_level", "unigram"])
def test_the_tokens_of_a_conversation_are_estimated_from_a_sample(kind: str) -> None:
    made = builder(kind)
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": {"n": 1}}}
    turns = [
        user("Read the file. " * 200),
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    turns += [{"role": "tool", "tool_call_id": "1", "content": "a line of it\n" * 300}]
    chat = Chat(turns, tools=TOOLS)
    assert made.estimate_tokens(chat) == pytest.approx(len(made.chat(chat).ids), rel=0.4)
    assert made.estimate_tokens(Chat([user("\ud800" * 9)])) > 0
    assert made.estimate_tokens(Chat([user("")])) == 0
