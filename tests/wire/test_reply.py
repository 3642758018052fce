"""A whole reply ends by itself, or its end is an error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from mlxcache.errors import GenerationFailed, NotReady
from mlxcache.types import Event, Finished, Text, Thinking, TokenLogprob, ToolCall
from mlxcache.wire.openai_reply import TextLogprobs
from mlxcache.wire.reply import WholeReply, finished_or_raise, gather_reply


@pytest.mark.parametrize(
    ("reason", "error"), [("cancelled", NotReady), ("error", GenerationFailed)]
)
def test_a_failed_or_cut_reply_raises(reason: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        finished_or_raise(Finished(reason, 1, 0, 0, 0))
    with pytest.raises(NotReady):
        finished_or_raise(None)


def said(text: str, *tokens: str, visible: bool = True) -> Text:
    """A piece of text with the log-probabilities of the tokens that were drawn by then."""
    return Text(text, tuple(TokenLogprob(token, 0, -1.0, visible=visible) for token in tokens))


async def gathered(*pieces: Event, stop_sequence: str | None = None) -> WholeReply:
    async def events() -> AsyncIterator[Event]:
        for piece in pieces:
            yield piece
        yield Finished("stop", 1, 0, 0, len(pieces), stop_sequence=stop_sequence)

    return await gather_reply(events())


@pytest.mark.parametrize(
    ("pieces", "stop", "tokens"),
    [
        ([said("a", "a"), said("", " ST"), said(" STx", "x")], None, ["a", " ST", "x"]),
        ([said("a", "a", "\udce2"), said("", "<end>", visible=False)], None, ["a", "\udce2"]),
        ([said("", "hm", visible=False), said("a", "a")], None, ["a"]),
        ([said("a", "a"), said("", "ST"), said("", "OP")], "STOP", ["a"]),
        ([said("a", "a"), said("", "\n"), ToolCall(0, "1", "f", "{}")], None, ["a"]),
        ([Thinking("hm"), said("", "\n"), said("", "\n\n"), said("a", "a")], None, ["a"]),
        ([Thinking("hm"), said("", "\n")], None, []),
        ([said("", "\n"), said("\na", "a"), said("\n", "\n")], None, ["\n", "a", "\n"]),
    ],
    ids=["held", "end", "thinking", "stop", "call", "template", "only template", "own newlines"],
)
async def test_log_probabilities_are_those_of_the_visible_text(
    pieces: list[Event], stop: str | None, tokens: list[str]
) -> None:
    reply = await gathered(*pieces, stop_sequence=stop)
    assert [one.token for one in reply.logprobs] == tokens


def test_tokens_that_cut_a_character_have_its_place_and_their_bytes() -> None:
    """As OpenAI writes them; two with the same place are told apart, also as alternatives."""
    parts = ["a", "\udce2\udc82", "\udcac", "b\udcc3", "c"]  # a, a sign in two parts, a wrong byte
    lists = TextLogprobs()
    found = lists.write([TokenLogprob(one, 0, -1.0, ((parts[1], 1, -0.5),)) for one in parts[:3]])
    assert found["text_offset"] == [0, 1, 1]
    assert found["tokens"] == ["a", "bytes:\\xe2\\x82", "bytes:\\xac"]
    assert found["top_logprobs"][0] == {"bytes:\\xe2\\x82": -0.5, "a": -1.0}
    assert found["top_logprobs"][1] == {"bytes:\\xe2\\x82": -0.5}
    rest = lists.write([TokenLogprob(one, 0, -1.0) for one in parts[3:]])
    assert rest["text_offset"] == [2, 4]
    raw = "".join(parts).encode(errors="surrogateescape").decode(errors="replace")
    assert raw == "a\u20acb\ufffdc"
