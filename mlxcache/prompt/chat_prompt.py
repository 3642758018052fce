"""The prompt of a conversation, with what it was rendered from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from mlxcache.prompt.incremental import Tokenised
from mlxcache.prompt.replies import GeneratedReply, PromptKey
from mlxcache.store.reply_rows import ReplyRow
from mlxcache.types import Chat, Prompt, token_ids


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class ChatPrompt(Prompt):
    """A prompt that was rendered from a conversation.

    `sent`, `chat`: the conversation before and after canonicalisation. `tokenised`: its text.
    `generation`: character of this text at which the generation prompt starts, or the text's length
    if there is none. `key`: finds the replies to the prompt; `asked` does so for other servers, or
    is empty if no replies are looked up.
    """

    param: ClassVar = "messages"
    sent: Chat
    chat: Chat
    tokenised: Tokenised
    generation: int
    key: PromptKey
    asked: bytes


def make_reply(
    prompt: Prompt, ids: Sequence[int], *, calls: bool, stopped: str | None
) -> GeneratedReply | None:
    """Return a reply in the form kept for replay; None if it is empty or has no conversation.

    `calls`: the reply was parsed for tool calls. `stopped`: the stop string that ended it, or None.
    """
    if not isinstance(prompt, ChatPrompt) or not len(ids):
        return None
    return GeneratedReply(
        ReplyRow(
            **asdict(prompt.key),
            ids=token_ids(ids),
            calls=calls,
            thinking_open=prompt.thinking_open,
            generic_tools=prompt.generic_tools,
            stopped=stopped,
        )
    )
