"""Replies that come back over HTTP feed nothing again, whatever tokens the model wrote them in."""

from __future__ import annotations

from tests.conftest import ToyMaker
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
