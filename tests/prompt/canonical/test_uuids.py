"""Session UUIDs are found, replaced, and mapped back exactly."""

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.prompt.canonical.canonicaliser import Canonicaliser
from mlxcache.prompt.canonical.uuids import NameRestorer, ReplyRestorer, _candidate
from mlxcache.types import Chat, Event, Finished, Text, Thinking, TokenLogprob, ToolCall

OWN = "aaf15967-cfc7-4d52-bfda-e1edd9858ef9"
OTHER = "9d00f0c5-975e-4197-b36d-8f1eb6052b13"
PATHS = [
    "/private/var/scratch/{}/pad",
    "/tmp/claude-1000/-home-me-project/{}/scratchpad",
    "/private/tmp/claude-501/-Users-me-project/{}/scratchpad/notes.md",
    "/private/var/folders/xx/yyyy0000gn/T/claude/{}",
    "C:/Users/me/AppData/Local/Temp/claude/C--Users-me/{}/scratchpad",
    "C:\\Users\\me too\\AppData\\Local\\Temp\\claude\\{}\\scratchpad",
    "~/.cache/agent/tmp/{}/x",
    "/home/me/.agent/{}/scratchpad",
    "/Users/me/.copilot/session-state/{}",
    "C:\\Users\\me\\.copilot\\session-state\\{}\\files",
]
AROUND = ["Scratchpad directory: {}", "Use `{}` for files.", "TMPDIR={}\nBe brief.", "({})", "{}."]


def system(text):
    return {"role": "system", "content": text}


def user(text):
    return {"role": "user", "content": text}


def canonicalise(*messages, stop=(), **fields):
    return Canonicaliser().canonicalise(Chat(messages, **fields), stop=stop)


TAKEN = [_candidate(i) for i in range(20_000)]


@pytest.mark.parametrize(
    "parts",
    [
        [f"/tmp/{OWN}/ ", *TAKEN],
        ["<total_tokens>9 tokens left</total_tokens>\n\n"] * 20_000,
        ["\n<total_tokens>9 tokens left</total_tokens>"] * 20_000,
    ],
)
def test_time_grows_with_the_length_of_a_text(parts: list[str]) -> None:
    """Somebody may write a text of what the rules look for alone."""

    def seconds(count: int) -> float:
        began = time.process_time()
        canonicalise(system("You are here. " + "".join(parts[:count])), user("x"))
        canonicalise(system("".join(parts[:count]) + " You are here."), user("x"))
        return time.process_time() - began

    assert min(seconds(20_000) for _ in range(3)) < 40 * seconds(2000)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("around", AROUND)
def test_two_sessions_render_alike(path, around):
    made = [
        canonicalise(system(around.format(path.format(own))), user("hi")) for own in (OWN, OTHER)
    ]
    assert made[0].rules == ("uuid",)
    assert made[0].chat.messages == made[1].chat.messages
    assert list(made[0].names.values()) == [OWN]
    assert OWN not in str(made[0].chat.messages)


@pytest.mark.parametrize(
    "text",
    [
        f"https://example.org/tmp/{OWN}/file",
        f"/home/me/projects/{OWN}/src",
        f"/home/me/session-state/{OWN}",
        f"/home/me/.copilot/session-state/x/{OWN}",
        f"The session is {OWN}.",
        f"/tmp/{OWN}x/scratchpad",
        f"/tmp/x{OWN}/scratchpad",
        f"/tmp/{OWN[:-1]}/scratchpad",
        f"/tmp/{OWN}.jsonl",
        f"/tmp/{OWN.upper()}/scratchpad",
        f"/tmp /home/{OWN}/x",
        f"/attempt/{OWN}/x",
    ],
)
def test_what_only_looks_like_it_stays(text):
    made = canonicalise(system(text), user("hi"))
    assert made.chat.messages[0]["content"] == text
    assert made.rules == ()


def test_what_a_person_wrote_stays():
    """Word for word, also where it holds the UUID; replies, calls, results and tools follow."""
    path = f"/tmp/claude/{OWN}/scratchpad"
    call = {"name": f"see_{OWN}", "arguments": {path: [path, 1]}}
    tool = {"name": f"see_{OWN}", "description": path, "parameters": {"type": "object"}}
    made = canonicalise(
        system(path),
        user(path),
        {
            "role": "assistant",
            "content": path,
            "reasoning_content": path,
            "tool_calls": [{"id": OWN, "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": OWN, "content": path},
        tools=({"type": "function", "function": tool},),
    )
    ((stable, own),) = made.names.items()
    shown = path.replace(own, stable)
    head, person, reply, result = made.chat.messages
    assert person == user(path)
    assert head["content"] == reply["content"] == reply["reasoning_content"] == shown
    assert reply["tool_calls"][0]["function"] == {**call, "arguments": {shown: [shown, 1]}}
    assert (result["content"], result["tool_call_id"]) == (shown, OWN)
    assert made.chat.tools[0]["function"] == {**tool, "description": shown}


def test_a_uuid_that_appears_after_the_first_reply_is_no_session_s():
    """So a mapping does not change in the middle of a conversation."""
    later = [user("a"), {"role": "assistant", "content": "b"}, system(f"/tmp/{OWN}/x"), user("c")]
    assert canonicalise(system("x"), *later).rules == ()


def test_a_stable_uuid_that_the_conversation_holds_is_not_taken():
    """A person who writes it gets it back as it is."""
    messages = system(f"/tmp/{OWN}/x"), user("hi")
    (first,) = canonicalise(*messages).names
    (second,) = canonicalise(*messages, user(f"what is {first}?")).names
    assert first != second
    assert NameRestorer({second: OWN}).map_text(f"{first} {second}") == f"{first} {OWN}"


@pytest.mark.parametrize("stop", ["e", OWN, f"/{OWN}/", OWN[5:9], "0-9"])
def test_stop_strings_that_could_meet_a_uuid_switch_it_off(stop):
    """They are looked for in what the model writes, and mean what the client reads."""
    made = canonicalise(system(f"/tmp/{OWN}/x"), user("hi"), stop=(stop,))
    assert bool(made.rules) == (stop == "0-9")


def test_a_reply_to_be_continued_inside_a_uuid_switches_it_off():
    """The model has to see the UUID whose rest it is to write."""
    for text, rules in ((f"in /tmp/{OWN[:9]}", ()), (f"in /tmp/{OWN}", ("uuid",))):
        messages = system(f"/tmp/{OWN}/x"), user("hi"), {"role": "assistant", "content": text}
        assert canonicalise(*messages, continue_final=True).rules == rules


STABLES = [_candidate(number) for number in range(3)]
UUIDS = st.uuids().map(str)
FRAGMENTS = st.one_of(
    st.sampled_from(STABLES),
    st.sampled_from(STABLES).flatmap(
        lambda name: st.integers(1, 35).flatmap(
            lambda n: st.sampled_from([name[:n], name[-n:], name[n:], "d" + name])
        )
    ),
    st.text(max_size=4),
    st.sampled_from(["d", "-", "/", "\n", "dd"]),
)


@st.composite
def mappings(draw):
    """UUIDs of sessions, some with an edge like their own other edge, and a text about them."""
    owns = draw(st.lists(UUIDS, min_size=1, max_size=3, unique=True))
    owns[0] = draw(st.sampled_from([owns[0], owns[0][:-2] + owns[0][:2], STABLES[0]]))
    parts = st.one_of(FRAGMENTS, st.sampled_from(owns), st.sampled_from(owns).map(lambda u: u[:34]))
    return list(dict.fromkeys(owns)), "".join(draw(st.lists(parts, max_size=8)))


@settings(deadline=None)
@given(mappings(), st.data())
def test_a_text_that_was_mapped_comes_back_exactly_however_it_is_split(case, data):
    owns, text = case
    head = " ".join(f"/tmp/{own}/x" for own in owns)
    made = canonicalise(system(head), user("hi"), {"role": "assistant", "content": text})
    shown = made.chat.messages[2]["content"]
    there = {own: name for name, own in made.names.items()}
    assert shown == re.sub("|".join(owns), lambda match: there[match.group()], text)
    assert not any(name in text or name in head for name in made.names)
    restored = NameRestorer(made.names)
    assert restored.map_text(shown) == text
    assert "".join(map(restored.feed, pieces(data, shown))) + restored.flush() == text


@settings(deadline=None)
@given(mappings(), st.data())
def test_what_the_model_writes_is_mapped_alike_in_any_pieces(case, data):
    owns, text = case
    names = dict(zip(STABLES, owns, strict=False))
    expected = re.sub("|".join(names), lambda match: names[match.group()], text)
    restored = NameRestorer(names)
    assert "".join(map(restored.feed, pieces(data, text))) + restored.flush() == expected


def pieces(data, text):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_every_kind_of_event_is_mapped_in_order():
    name = STABLES[0]
    seen: list[ToolCall] = []
    reply = ReplyRestorer({name: OWN}, seen.append)
    logprob = TokenLogprob("d", 1, -0.5)
    call = ToolCall(0, "c", "Read", json.dumps({"path": f"/tmp/{name}/x", name: 1}))
    end = Finished("stop", 1, 0, 0, 1)
    events: list[Event] = [
        Thinking(f"in {name[:20]}"),
        Thinking(name[20:]),
        Thinking(name[:5]),
        Text("so "),
        Text(name[:3], (logprob,)),
        call,
        Text(name),
        Text("d"),
        end,
    ]
    shown = [out for event in events for out in reply.events(event)]
    assert "".join(e.text for e in shown if isinstance(e, Thinking)) == f"in {OWN}{name[:5]}"
    assert [e for e in shown if not isinstance(e, Thinking)] == [
        Text("so "),
        Text("", (logprob,)),
        Text(name[:3]),
        ToolCall(0, "c", "Read", json.dumps({"path": f"/tmp/{OWN}/x", OWN: 1})),
        Text(OWN),
        Text("d"),
        end,
    ]
    assert seen == [call]
