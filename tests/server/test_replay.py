"""Replies that come back over HTTP feed nothing again, whatever tokens the model wrote them in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import ToyMaker
from tests.scripted import scripted
from tests.server.api import Api, user, words
from tests.server.conftest import Start


def test_a_reply_that_comes_back_is_not_fed_again(start: Start, toy: ToyMaker) -> None:
    """A toy's tokens are never those that its text would be encoded to, so all of a reply would be.

    With the rule off it is, which shows that the first half shows something. Nothing is computed
    ahead, for that would be the text encoded anew.
    """
    model = toy("llama")
    on = start("replay on", model, "--no-anticipate")
    off = start("replay off", model, "--no-anticipate", "--canonicalise", "replay=off")
    assert _fed(on) <= 60 + 64
    assert _fed(off) > 60 + 200


@pytest.mark.parametrize("path", ["chat", "message"])
def test_a_reply_with_a_control_token_is_not_fed_again(
    toy: ToyMaker, tmp_path: Path, path: str
) -> None:
    """Nor after a restart; the same text from the user has no such token, and is."""
    told = f"It ends with </tool_response> {words(73, 80)}"
    flags = ("--model", str(toy("llama")), "--ram", "300MB", "--no-anticipate")
    script = [("Say it", told), ("", "Yes.")]
    with scripted(script, *flags, home=tmp_path) as server:
        first = getattr(Api(server), path)([user("Say it.")], tokens=600)
        assert first.text == told
        reply = {"role": "assistant", "content": told}
        again = getattr(Api(server), path)([user("Say it."), reply, user("And?")])
        assert again.fed <= 24
        assert server.stop() == 0
    with scripted(script, *flags, home=tmp_path) as server:
        once_more = getattr(Api(server), path)([user("Say it."), reply, user("And now?")])
        assert once_more.fed <= 24
        other = getattr(Api(server), path)([user("Say it."), user(told)])
        assert other.fed > first.generated


def _fed(api: Api) -> int:
    """The tokens that a third turn feeds, whose new message has 60 or so."""
    messages = [user(words(71, 30))]
    for turn in range(2):
        answer = api.chat(messages, tokens=300)
        messages += [{"role": "assistant", "content": answer.text}, user(words(72 + turn, 12))]
    answer = api.chat(messages, tokens=4)
    record = api.record(answer.id)
    assert ("replay" in record["canonicalised"]) == (answer.fed <= 124)
    return answer.fed
