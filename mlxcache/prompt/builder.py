"""From a conversation to the token ids that it renders to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxcache.common_prefix import common_characters, common_length
from mlxcache.errors import ContextLengthExceeded, MlxcacheError
from mlxcache.prompt.canonical.canonicaliser import LONGER, Canonical, Canonicaliser
from mlxcache.prompt.codec import Codec
from mlxcache.prompt.escape import Escape
from mlxcache.prompt.explain import Source
from mlxcache.prompt.images import Album, Pictures, with_images
from mlxcache.prompt.incremental import (
    Anchors,
    Tokenised,
    Tokeniser,
    incremental_holds,
    place,
)
from mlxcache.prompt.marks import learn_openers, marks, wished
from mlxcache.prompt.next_turn import following
from mlxcache.prompt.renderer import Renderer
from mlxcache.prompt.replay import Replay, Replayed
from mlxcache.prompt.replies import Asked, Generated, Read, Reading, Replies
from mlxcache.prompt.template import Template, check_arguments, too_deep
from mlxcache.prompt.tokenizer import (
    Added,
    ChatTokenizer,
    added_tokens,
    backend_of,
    control_tokens,
    thinking_marks,
    tool_marks,
)
from mlxcache.prompt.traits import U, probe
from mlxcache.types import Chat, Prompt

log = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]


class PromptBuilder:
    """Renders and tokenises conversations for one model. Safe in any thread.

    `template_args` go to the chat template of every conversation; a conversation's own win.
    What the template takes, and whether its tokenizer can work incrementally, is found out
    here, by rendering and encoding small conversations; that takes tens of milliseconds.
    `context`: the tokens that the model takes, if there is a limit. It spares tokenising what is
    many times longer; what is a little too long is for others to refuse. `pictures`: what the model
    has for images, if it takes any; `takes_images` tells whether its template does, too.
    `rules`: which rules of canonicalisation are on, where not those that are on by themselves.
    `read`: reads a reply's ids, if there are any to be put in again. `replies`: those known
    already, and a place for new ones; others may add to it meanwhile.
    `incremental`: only what changed since a session's last turn is tokenised.
    Raises ConfigError where `template_args` are not for the template, or break it.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        template_args: Mapping[str, Any] | None = None,
        context: int | None = None,
        pictures: Pictures | None = None,
        rules: Mapping[str, bool] | None = None,
        *,
        read: Read | None = None,
        replies: Replies | None = None,
    ):
        args = dict(template_args or {})
        self._context, self._decode = context, tokenizer._tokenizer.decode
        template = Template(tokenizer)
        check_arguments(template, args)
        self._think = (tokenizer.think_start, tokenizer.think_end)
        thinking, added = thinking_marks(tokenizer), added_tokens(tokenizer)
        controls = control_tokens(added, template.source, [*thinking, *tool_marks(tokenizer)])
        escape = _escape(tokenizer, controls, thinking)
        self.traits = probe(template, args)
        self._album = Album(template, pictures, args)
        self.takes_images = self._album.exists
        self._renderer = Renderer(template, self.traits, escape, args, self._album)
        self._codec = Codec(tokenizer, added, controls, escape)
        anchors = Anchors(added, controls, normalizer=_normalizer(tokenizer) is not None)
        self._tokeniser = Tokeniser(self._codec, anchors, incremental=self._codec.direct)
        self.openers = learn_openers(self._renderer, anchors)
        self.incremental = self._codec.direct and incremental_holds(
            self._tokeniser, controls, self._sample()
        )
        self._tokeniser.incremental = self.incremental
        self._replay: Replay | None = None
        if read is not None and self.incremental:
            known = Replies() if replies is None else replies
            reading = Reading(tokenizer, read, anchors, pictures.token_id if pictures else None)
            self._replay = Replay(reading, self._codec, self._renderer, escape.steady, known)
        self.canonicaliser = Canonicaliser(rules, self._replay.thought if self._replay else None)
        if not self.incremental:
            log.warning(
                "this tokenizer cannot begin at a special token: every turn is encoded whole"
            )

    def text(self, text: str) -> Prompt:
        """The prompt of a bare text, in which control tokens are control tokens.

        Raises BadRequest if the text is not Unicode, ContextLengthExceeded if it is far too long.
        """
        self._refuse_too_long(text, "prompt")
        return Prompt(self._codec.raw(text))

    def chat(self, chat: Chat, session: str | None = None, stop: Sequence[str] = ()) -> Prompt:
        """The prompt of a conversation, which is canonicalised first.

        `session` is a label under which texts are remembered, so that the next turn's is
        tokenised from where it differs. `stop`: the strings that end the reply. Raises BadRequest
        for a conversation that cannot be rendered, ContextLengthExceeded for one that is far too
        long, GenerationFailed if the template breaks.
        """
        return self._chat(chat, session, stop)

    def ahead(self, chat: Chat, session: str | None = None, stop: Sequence[str] = ()) -> Prompt:
        """What the prompts of all that goes on with a conversation begin with.

        That is to where the next message's own text begins, and one token more, which is anything:
        the least that there is to feed. Among its marks is where a client that takes white space
        off the last reply parts from one that does not. Raises as `chat` does.
        """
        one, *others = (self._chat(way, session, stop, more) for way, more in following(chat))
        shared = [common_length(one.ids, other.ids) for other in others]
        end = shared[0] + 1
        return Prompt(
            one.ids[:end],
            tuple(sorted({*(mark for mark in (*one.marks, *shared[1:]) if mark < end)})),
            tokens=None if one.tokens is None else one.tokens[:end],
            images=one.images,
        )

    def _chat(
        self, chat: Chat, session: str | None, stop: Sequence[str], more: Messages = ()
    ) -> Prompt:
        """As `chat`; `more` are messages that follow on the canonicalised ones."""
        try:
            canonical = self._canonical(chat, session, stop, more)
            if not set(LONGER).isdisjoint(canonical.rules):
                prompt = self._if_short(chat, canonical, session)
                if prompt is not None:
                    return prompt
                canonical = self._canonical(chat, session, stop, more, LONGER)
        except RecursionError as error:
            raise too_deep() from error
        return self._prompt(chat, canonical, session)

    def _canonical(
        self,
        chat: Chat,
        session: str | None,
        stop: Sequence[str],
        more: Messages,
        without: Sequence[str] = (),
    ) -> Canonical:
        found = self.canonicaliser.canonical(chat, session, stop, without)
        if not more:
            return found
        return replace(found, chat=replace(found.chat, messages=[*found.chat.messages, *more]))

    def _if_short(self, sent: Chat, canonical: Canonical, session: str | None) -> Prompt | None:
        """The prompt of what is longer than the client sent it, if that leaves a reply its room."""
        try:
            prompt = self._prompt(sent, canonical, session)
        except ContextLengthExceeded:
            return None
        room = self._context is None or len(prompt.ids) <= self._context * 3 // 4
        return prompt if room else None

    def _prompt(self, sent: Chat, canonical: Canonical, session: str | None) -> Prompt:
        chat = canonical.chat
        rendered = self._renderer.render(chat)
        self._refuse_too_long(rendered.text, "messages")
        replayed = self._replayed(rendered.text, chat)
        prompt = self._tokeniser.encode(replayed.text, session, replayed.splices)
        begins = place(rendered.generation, prompt.splices)
        generation = self._tokeniser.position(prompt, begins)
        placed = marks(prompt, self.openers, generation)
        end = self._breakpoint(chat, prompt, generation)
        made = Prompt(
            ids=prompt.ids,
            marks=placed,
            breakpoint=end,
            keeps=wished(chat.keeps, placed, end),
            thinking_open=self._thinking(begins, prompt, placed),
            generic_tools=bool(chat.tools) and not self.traits.tools,
            rules=canonical.rules + (("replay",) if prompt.splices and replayed.changed else ()),
            names=canonical.names,
            source=Source(
                sent,
                canonical,
                prompt,
                begins,
                Asked(replayed.digest, len(rendered.text), replayed.tail, canonical.history),
            ),
        )
        return with_images(made, self._album, rendered.images) if rendered.images else made

    def _replayed(self, text: str, chat: Chat) -> Replayed:
        """A rendered text with the replies in it as they were generated."""
        if self._replay is None:
            return Replayed(text)
        return self._replay.replayed(text, chat.tools, on=self.canonicaliser.on("replay"))

    def remember(self, reply: Generated | None) -> None:
        """Keep a reply, to be put in where it comes back. Any thread; returns at once."""
        if self._replay is not None and reply is not None:
            self._replay.replies.put(reply)

    def reach(self, source: Source, leading: int) -> int:
        """How many tokens of a prompt stand before its message `leading`, or before its reply."""
        chat, made = source.chat, source.tokenised
        if leading >= len(chat.messages):
            return self._tokeniser.position(made, source.generation)
        following = {**chat.messages[leading], "content": U}
        if following["role"] == "assistant":
            following = {"role": "assistant", "content": U}
        messages = [*chat.messages[:leading], following]
        try:
            shown = self._renderer.render(replace(chat, messages=messages, continue_final=False))
        except MlxcacheError:
            return 0
        return made.floor(place(common_characters(shown.text, made.plain), made.splices))

    def position(self, source: Source, char: int) -> int:
        """How many tokens of a prompt stand before a character of its rendered text."""
        return self._tokeniser.position(source.tokenised, char)

    def decode(self, ids: Sequence[int]) -> str:
        """A text for token ids, control tokens written out."""
        return str(self._decode(list(ids)))

    def _refuse_too_long(self, text: str, param: str) -> None:
        if self._context is not None and self._codec.exceeds(text, self._context):
            raise ContextLengthExceeded(
                f"prompt is too long: {len(text)} characters, far more than {self._context} tokens",
                param=param,
            )

    def _breakpoint(self, chat: Chat, prompt: Tokenised, generation: int) -> int | None:
        """The token position of a conversation's breakpoint."""
        leading = chat.breakpoint
        if leading is None:
            return None
        if leading >= len(chat.messages):
            return generation
        shared = self._renderer.shared(chat, leading, prompt.plain)
        shared = place(shared, prompt.splices)
        if len(prompt.at):
            return prompt.floor(shared)
        return self._tokeniser.position(prompt, shared)

    def _thinking(self, generation: int, prompt: Tokenised, placed: tuple[int, ...]) -> bool:
        """Whether the text after the last mark opens a think block and does not close it."""
        start, end = self._think
        if not start or not end:
            return False
        tail = prompt.text[min(generation, prompt.char(placed[-1] if placed else 0)) :]
        return tail.rfind(start) > tail.rfind(end)

    def _sample(self) -> str:
        try:
            return self._renderer.probe([{"role": "user", "content": U}], tools=True)
        except MlxcacheError:
            return ""


def _escape(tokenizer: ChatTokenizer, controls: Sequence[Added], thinking: list[str]) -> Escape:
    return Escape(
        [token.text for token in controls],
        thinking,
        [token.text for token in controls if token.normalized],
        normalize=_normalizer(tokenizer),
    )


def _normalizer(tokenizer: ChatTokenizer) -> Callable[[str], str] | None:
    normalizer = getattr(backend_of(tokenizer), "normalizer", None)
    return None if normalizer is None else normalizer.normalize_str
