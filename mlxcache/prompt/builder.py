"""The prompt builder: canonicalises, renders, replays and tokenises conversations for one model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxcache.common_prefix import common_characters, common_length
from mlxcache.errors import ContextLengthExceeded, MlxcacheError
from mlxcache.guess.forms import writes_escaped
from mlxcache.prompt.canonical.canonicaliser import LENGTHENING, Canonical, Canonicaliser
from mlxcache.prompt.codec import Codec
from mlxcache.prompt.escape import Escape
from mlxcache.prompt.explain import Source
from mlxcache.prompt.images import ImageProcessor, ImageTemplate, add_images
from mlxcache.prompt.incremental import (
    ControlTokenFinder,
    Tokenised,
    Tokeniser,
    check_incremental,
    spliced_position,
)
from mlxcache.prompt.marks import find_marks, keep_positions, learn_openers
from mlxcache.prompt.next_turn import next_turns
from mlxcache.prompt.renderer import Renderer
from mlxcache.prompt.replay import Replay, ReplayedText
from mlxcache.prompt.replies import GeneratedReply, PromptKey, ReadReply, Replies, ReplyReader
from mlxcache.prompt.result_forms import ResultForms
from mlxcache.prompt.template import Template, check_arguments, too_deep
from mlxcache.prompt.tokenizer import (
    Added,
    ChatTokenizer,
    added_tokens,
    backend_of,
    control_tokens,
    thinking_markers,
    tool_markers,
)
from mlxcache.prompt.traits import KEY, LONG_ID, NAME, U, probe
from mlxcache.types import Chat, Prompt

log = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]

_SAMPLE = 2048
"""Characters of a conversation that are encoded to learn how many make a token."""


class PromptBuilder:
    """Renders and tokenises conversations for one model. Thread-safe.

    The constructor renders and encodes small conversations, which takes tens of milliseconds, to
    detect the template's features and whether the tokenizer can work incrementally.

    `template_args`: arguments of the chat template for every conversation; a conversation's own
    arguments take precedence. `context`: the model's context length in tokens; far longer texts are
    refused before they are tokenised. None sets no limit. `processor`: the model's image processor,
    or None. `rules`: canonicalisation rules by name, True for on; other rules keep their defaults.
    `read` parses the token ids of a reply; without it no reply is replayed. `replies`: known
    replies; `remember` adds to them, and other code may too. `label`: that of the model, for the
    log.

    Attributes: `takes_images`: True if model and template support images. `incremental`: True if
    only what changed since a session's last turn is tokenised. `openers`: ids of the tokens that
    open a message. `forms`: token ids of tool results in the form in which a reply would repeat
    them, from which the next tokens of a reply are guessed.

    Raises ConfigError for `template_args` that the template does not support.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        template_args: Mapping[str, Any] | None = None,
        context: int | None = None,
        processor: ImageProcessor | None = None,
        rules: Mapping[str, bool] | None = None,
        *,
        read: ReadReply | None = None,
        replies: Replies | None = None,
        label: str = "unnamed",
    ):
        args = dict(template_args or {})
        self._context, self._decode = context, tokenizer._tokenizer.decode
        template = Template(tokenizer)
        if not template.exists:
            log.warning(
                "model %s: conversations are rendered as plain text: it has no chat template", label
            )
        check_arguments(template, args)
        self._think = (tokenizer.think_start, tokenizer.think_end)
        thinking, added = thinking_markers(tokenizer), added_tokens(tokenizer)
        controls = control_tokens(added, template.source, [*thinking, *tool_markers(tokenizer)])
        escape = _escape(tokenizer, controls, thinking)
        self.traits = probe(template, args)
        self._images = ImageTemplate(template, processor, args, self.traits)
        self.takes_images = self._images.supported
        if processor is not None and not self.takes_images:
            log.warning("model %s: images disabled: its chat template does not render them", label)
        self._renderer = Renderer(template, self.traits, escape, args, self._images)
        self._codec = Codec(tokenizer, added, controls, escape)
        finder = ControlTokenFinder(added, controls, normalizer=_normalizer(tokenizer) is not None)
        self.openers = learn_openers(self._renderer, finder)
        self.incremental = self._codec.direct and check_incremental(
            Tokeniser(self._codec, finder), controls, self._sample()
        )
        self._tokeniser = Tokeniser(self._codec, finder, incremental=self.incremental)
        self.forms = ResultForms(self._codec.encode, escaped=writes_escaped(self._shown_call))
        self._replay: Replay | None = None
        if read is not None and self.incremental:
            image_token = processor.token_id if processor else None
            reader = ReplyReader(tokenizer, read, finder, image_token)
            known = Replies() if replies is None else replies
            self._replay = Replay(reader, self._codec, self._renderer, escape.without_nonce, known)
        known_reply = self._replay.find_reply if self._replay else None
        self.canonicaliser = Canonicaliser(rules, known_reply)
        if not self.incremental:
            log.warning(
                "model %s: incremental tokenisation and replay of replies disabled: the "
                "tokenizer's ids after a control token depend on the text before it",
                label,
            )

    def text(self, text: str) -> Prompt:
        """Return the prompt of a plain text.

        The text of a control token in it becomes that token. Raises BadRequest if the text is not
        valid Unicode, and ContextLengthExceeded if it is far longer than the model's context.
        """
        self._refuse_too_long(text, "prompt")
        return Prompt(self._codec.encode_raw(text))

    def chat(
        self,
        chat: Chat,
        session: str | None = None,
        stop: Sequence[str] = (),
        new: Messages = (),
    ) -> Prompt:
        """Return the prompt of a conversation.

        `session`: label under which the text is remembered, so that the next turn is tokenised only
        from the first difference. `stop`: strings that will end the reply. `new`: messages to
        append after canonicalisation. Raises BadRequest for a conversation that cannot be rendered,
        ContextLengthExceeded for one that is far longer than the model's context, and
        GenerationFailed if the template fails.
        """
        try:
            canonical = self._canonicalise(chat, session, stop, new)
            if not set(LENGTHENING).isdisjoint(canonical.rules):
                prompt = self._prompt_if_short(chat, canonical, session)
                if prompt is not None:
                    return prompt
                canonical = self._canonicalise(chat, session, stop, new, LENGTHENING)
        except RecursionError as error:
            raise too_deep() from error
        return self._prompt(chat, canonical, session)

    def next_turn(self, chat: Chat, session: str | None = None, stop: Sequence[str] = ()) -> Prompt:
        """Return the common prefix of all prompts that can continue a conversation.

        `chat` ends with the reply. `session`: label under which the text is remembered. `stop`:
        strings that will end the next reply. The prefix ends where the text of the next message
        begins, and has one arbitrary token more, because at least one token must be fed. A mark is
        added at the position where the prompt diverges if the client strips white space from the
        reply. Raises the errors of the method `chat`.
        """
        one, *others = (self.chat(turn, session, stop, new) for turn, new in next_turns(chat))
        shared = [common_length(one.ids, other.ids) for other in others]
        end = shared[0] + 1
        return Prompt(
            one.ids[:end],
            tuple(sorted({*(mark for mark in (*one.marks, *shared[1:]) if mark < end)})),
            tokens=None if one.tokens is None else one.tokens[:end],
            images=one.images,
        )

    def _canonicalise(
        self,
        chat: Chat,
        session: str | None,
        stop: Sequence[str],
        new: Messages,
        without: Sequence[str] = (),
    ) -> Canonical:
        found = self.canonicaliser.canonicalise(chat, session, stop, without)
        if not new:
            return found
        return replace(found, chat=replace(found.chat, messages=[*found.chat.messages, *new]))

    def _prompt_if_short(
        self, sent: Chat, canonical: Canonical, session: str | None
    ) -> Prompt | None:
        """Return the prompt if it takes at most three quarters of the context length, else None.

        Used for a conversation that canonicalisation has lengthened. `sent`: the conversation as
        the client sent it. `session`: label under which the text is remembered.
        """
        try:
            prompt = self._prompt(sent, canonical, session)
        except ContextLengthExceeded:
            return None
        fits = self._context is None or len(prompt.ids) <= self._context * 3 // 4
        return prompt if fits else None

    def _prompt(self, sent: Chat, canonical: Canonical, session: str | None) -> Prompt:
        chat = canonical.chat
        rendered = self._renderer.render(chat)
        self._refuse_too_long(rendered.text, "messages")
        replayed = self._splice_replies(rendered.text, chat)
        prompt = self._tokeniser.encode(replayed.text, session, replayed.splices)
        generation = spliced_position(rendered.generation, prompt.splices)
        position = self._tokeniser.position(prompt, generation)
        marks = find_marks(prompt, self.openers, position)
        end = self._breakpoint(chat, prompt, position)
        known = tuple(dict.fromkeys((*canonical.found.keys, *replayed.replies)))
        history = canonical.found.history
        key = PromptKey(replayed.digest, len(rendered.text), replayed.tail, history)
        made = Prompt(
            ids=prompt.ids,
            marks=marks,
            breakpoint=end,
            keeps=keep_positions(chat.keeps, marks, end),
            thinking_open=self._opens_thinking(generation, prompt, marks),
            continued=chat.continue_final,
            generic_tools=bool(chat.tools) and not self.traits.tools,
            rules=_with_replay(canonical.rules, prompt.splices and replayed.changed),
            names=canonical.names,
            source=Source(sent, canonical, prompt, generation, key, known),
        )
        return add_images(made, self._images, rendered.images) if rendered.images else made

    def _splice_replies(self, text: str, chat: Chat) -> ReplayedText:
        if self._replay is None:
            return ReplayedText(text)
        enabled = self.canonicaliser.is_on("replay")
        return self._replay.splice_replies(text, chat.tools, enabled=enabled)

    def remember(self, reply: GeneratedReply | None) -> None:
        """Remember a reply, to replay it when a client sends it back. Returns at once.

        Does nothing for None, or if the builder replays no replies.
        """
        if self._replay is not None and reply is not None:
            self._replay.replies.add(reply)

    def unknown_replies(self, chat: Chat, session: str | None = None) -> tuple[bytes, ...]:
        """Return a digest of the messages before each reply in `chat` that is not a known reply.

        These are the digests `Found.unknown` of `canonical.replies`, by which the replies can be
        looked up in the remote. `session`: label of the conversation's session. Raises BadRequest
        for a conversation that is nested too deeply.
        """
        if self._replay is None or not any(m.get("role") == "assistant" for m in chat.messages):
            return ()
        try:
            return self.canonicaliser.canonicalise(chat, session).found.unknown
        except RecursionError as error:
            raise too_deep() from error

    def estimate_tokens(self, chat: Chat) -> int:
        """Return about how many tokens a conversation has, without tokenising all of it.

        The number is the length of its texts times the tokens per character of a sample.
        """
        texts = list(_texts(chat))
        longest = max(texts, key=len, default="")
        start = max(0, (len(longest) - _SAMPLE) // 2)
        sample = longest[start : start + _SAMPLE].encode("utf-8", "replace").decode()
        if not sample:
            return 0
        return sum(map(len, texts)) * len(self._codec.encode(sample)) // len(sample)

    def message_position(self, source: Source, leading: int) -> int:
        """Return the token position at which the message with index `leading` begins in a prompt.

        `source`: origin of the prompt. `leading` counts from 0 and includes system messages. If it
        is the number of messages, the result is the position of the generation prompt. Returns 0 if
        the messages up to this one cannot be rendered.
        """
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
        shared = common_characters(shown.text, made.rendered)
        return made.position_before(spliced_position(shared, made.splices))

    def text_position(self, source: Source, char: int) -> int:
        """Return the number of tokens of a prompt before character `char` of its rendered text.

        `source`: origin of the prompt.
        """
        return self._tokeniser.position(source.tokenised, char)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including control tokens."""
        return str(self._decode(list(ids)))

    def _refuse_too_long(self, text: str, param: str) -> None:
        if self._context is not None and self._codec.exceeds(text, self._context):
            raise ContextLengthExceeded(
                f"prompt is too long: {len(text)} characters, far more than {self._context} tokens",
                param=param,
            )

    def _breakpoint(self, chat: Chat, prompt: Tokenised, generation: int) -> int | None:
        """Return the token position at which a conversation's cache breakpoint ends, or None.

        None is returned if the client marked no message. `generation`: token position at which the
        generation prompt starts.
        """
        leading = chat.breakpoint
        if leading is None:
            return None
        if leading >= len(chat.messages):
            return generation
        shared = self._renderer.shared_characters(chat, leading, prompt.rendered)
        shared = spliced_position(shared, prompt.splices)
        if len(prompt.at):
            return prompt.position_before(shared)
        return self._tokeniser.position(prompt, shared)

    def _opens_thinking(self, generation: int, prompt: Tokenised, marks: tuple[int, ...]) -> bool:
        """Return whether the end of a prompt opens a thinking block without closing it.

        Examines the text after the last of `marks`, which are token positions, or after character
        `generation`, where the generation prompt starts, whichever comes first.
        """
        start, end = self._think
        if not start or not end:
            return False
        tail = prompt.text[min(generation, prompt.char_before(marks[-1] if marks else 0)) :]
        return tail.rfind(start) > tail.rfind(end)

    def _shown_call(self, value: str) -> str:
        """Return the text of a conversation that ends with a tool call with the argument `value`.

        Returns "" if the template cannot render it.
        """
        function = {"name": NAME, "arguments": {KEY: value}}
        call = {"id": LONG_ID, "type": "function", "function": function}
        reply = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            return self._renderer.probe([{"role": "user", "content": U}, reply], tools=True)
        except MlxcacheError:
            return ""

    def _sample(self) -> str:
        try:
            return self._renderer.probe([{"role": "user", "content": U}], tools=True)
        except MlxcacheError:
            return ""


def _with_replay(rules: tuple[str, ...], replayed: object) -> tuple[str, ...]:
    """Return the names of the canonicalisation rules that changed a prompt.

    These are `rules`, with "replay" added if `replayed` is true.
    """
    return (*rules, "replay") if replayed and "replay" not in rules else rules


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


def _texts(chat: Chat) -> Iterator[str]:
    """Yield the texts of a conversation: contents, thinking, calls and tools."""
    for message in chat.messages:
        content = message.get("content") or ""
        parts = [content] if isinstance(content, str) else content
        yield from (part for part in parts if isinstance(part, str))
        yield from (
            str(message[key]) for key in ("reasoning_content", "tool_calls") if key in message
        )
    yield from map(str, chat.tools)
