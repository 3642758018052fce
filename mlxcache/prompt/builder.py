"""The prompt builder: canonicalises, renders, replays and tokenises conversations for one model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxcache.common_prefix import common_characters, common_length
from mlxcache.errors import ContextLengthExceeded, MlxcacheError
from mlxcache.guess.forms import reply_form, writes_escaped
from mlxcache.lru import LRU
from mlxcache.prompt.canonical.canonicaliser import LENGTHENING, Canonical, Canonicaliser
from mlxcache.prompt.canonical.draft import strings
from mlxcache.prompt.chat_prompt import ChatPrompt
from mlxcache.prompt.codec import Codec, Escape
from mlxcache.prompt.images import ImageProcessor, ImageTemplate
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
from mlxcache.prompt.template import (
    KEY,
    LONG_ID,
    NAME,
    Message,
    Template,
    U,
    check_arguments,
    probe,
    too_deep,
)
from mlxcache.prompt.tokenizer import (
    ChatTokenizer,
    added_tokens,
    backend_of,
    control_tokens,
    thinking_markers,
    tool_markers,
)
from mlxcache.types import NO_TOKENS, Chat, ImageSpan, Prompt, Tokens

log = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]

_SAMPLE = 2048
"""Characters of a conversation that are encoded to learn how many make a token."""

_FORM_BYTES = 16 << 20

_ASKED: Message = {"role": "user", "content": U}


class PromptBuilder:
    """Renders and tokenises conversations for one model. Thread-safe.

    The constructor renders small conversations, which takes tens of milliseconds, to detect the
    template's features and whether the tokenizer can work incrementally. Raises ConfigError for
    `template_args` that the template does not support. Without `read`, which parses the token ids
    of a reply, no reply is replayed. Others may add to `replies` too.

    Attributes: `incremental`: only what changed since a session's last turn is tokenised.
    `openers`: ids of the tokens that open a message.
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
        normalizer = getattr(backend_of(tokenizer), "normalizer", None)
        escape = Escape(
            [token.text for token in controls],
            thinking,
            [token.text for token in controls if token.normalized],
            normalize=None if normalizer is None else normalizer.normalize_str,
        )
        self.traits = probe(template, args)
        self._images = ImageTemplate(template, processor, args, self.traits)
        self.takes_images = self._images.supported
        if processor is not None and not self.takes_images:
            log.warning("model %s: images disabled: its chat template does not render them", label)
        self._renderer = Renderer(template, self.traits, escape, args, self._images)
        self._codec = Codec(tokenizer, added, controls, escape)
        finder = ControlTokenFinder(added, controls, normalizer=normalizer is not None)
        self.openers = learn_openers(self._renderer, finder)
        self.incremental = self._codec.direct and check_incremental(
            Tokeniser(self._codec, finder), controls, self._probe([_ASKED])
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
        """Return the prompt of a plain text, in which the text of a control token becomes it.

        Raises BadRequest and ContextLengthExceeded.
        """
        self._refuse_too_long(text, "prompt")
        return Prompt(self._codec.encode_raw(text))

    def chat(
        self,
        chat: Chat,
        session: str | None = None,
        stop: Sequence[str] = (),
        new: Messages = (),
    ) -> ChatPrompt:
        """Return the prompt of a conversation.

        `session`: label under which the text is remembered, so that the next turn is tokenised only
        from the first difference. `new`: messages to append after canonicalisation. Raises
        BadRequest, ContextLengthExceeded, and GenerationFailed if the template fails.
        """
        try:
            canonical = self._canonicalise(chat, session, stop, new)
            if not set(LENGTHENING).isdisjoint(canonical.rules):
                try:
                    prompt = self._prompt(chat, canonical, session)
                    if self._context is None or len(prompt.ids) <= self._context * 3 // 4:
                        return prompt
                except ContextLengthExceeded:
                    pass
                canonical = self._canonicalise(chat, session, stop, new, LENGTHENING)
        except RecursionError as error:
            raise too_deep() from error
        return self._prompt(chat, canonical, session)

    def next_turn(self, chat: Chat, session: str | None = None, stop: Sequence[str] = ()) -> Prompt:
        """Return the common prefix of all prompts that continue a conversation ending with a reply.

        It has one arbitrary token more, because at least one token must be fed. A mark is added
        where the prompt diverges if the client strips white space from the reply.
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

    def _prompt(self, sent: Chat, canonical: Canonical, session: str | None) -> ChatPrompt:
        chat, found = canonical.chat, canonical.found
        rendered = self._renderer.render(chat)
        self._refuse_too_long(rendered.text, "messages")
        replayed = ReplayedText(rendered.text)
        if self._replay is not None:
            enabled = self.canonicaliser.is_on("replay")
            replayed = self._replay.splice_replies(rendered.text, chat.tools, enabled=enabled)
        made = self._tokeniser.encode(replayed.text, session, replayed.splices)
        generation = spliced_position(rendered.generation, made.splices)
        position = self._tokeniser.position(made, generation)
        marks = find_marks(made, self.openers, position)
        end = self._breakpoint(chat, made, position)
        rules = canonical.rules
        if made.splices and replayed.changed and "replay" not in rules:
            rules = (*rules, "replay")
        ids, tokens = made.ids, None
        images: tuple[ImageSpan, ...] = ()
        if rendered.images:
            tokens = ids
            ids, images = self._images.locate(ids, rendered.images)
        return ChatPrompt(
            ids=ids,
            tokens=tokens,
            images=images,
            marks=marks,
            breakpoint=end,
            keeps=keep_positions(chat.keeps, marks, end),
            thinking_open=self._opens_thinking(generation, made, marks),
            continued=chat.continue_final,
            generic_tools=bool(chat.tools) and not self.traits.tools,
            rules=rules,
            names=canonical.names,
            replies=tuple(dict.fromkeys((*found.keys, *replayed.replies))),
            sent=sent,
            chat=chat,
            tokenised=made,
            generation=generation,
            key=PromptKey(replayed.digest, len(rendered.text), replayed.tail, found.history),
            asked=found.asked,
        )

    def remember(self, reply: GeneratedReply | None) -> None:
        """Remember a reply, to replay it when a client sends it back. Returns at once."""
        if self._replay is not None and reply is not None:
            self._replay.replies.add(reply)

    def unknown_replies(self, chat: Chat, session: str | None = None) -> tuple[bytes, ...]:
        """Return a digest of the messages before each unknown reply, to look it up elsewhere."""
        if self._replay is None or not any(m.get("role") == "assistant" for m in chat.messages):
            return ()
        try:
            return self.canonicaliser.canonicalise(chat, session).found.unknown
        except RecursionError as error:
            raise too_deep() from error

    def estimate_tokens(self, chat: Chat) -> int:
        """Return about how many tokens a conversation has, from those of a sample of its texts."""
        said = ("content", "reasoning_content", "tool_calls")
        parts = [message.get(key) for message in chat.messages for key in said]
        texts = [*strings(parts), *strings(chat.tools)]
        longest = max(texts, key=len, default="")
        start = max(0, (len(longest) - _SAMPLE) // 2)
        sample = longest[start : start + _SAMPLE].encode("utf-8", "replace").decode()
        if not sample:
            return 0
        return sum(map(len, texts)) * len(self._codec.encode(sample)) // len(sample)

    def message_position(self, prompt: ChatPrompt, leading: int) -> int:
        """Return the token position at which the message with index `leading` begins in a prompt.

        If it is the number of messages, that of the generation prompt. Returns 0 if the messages
        cannot be rendered.
        """
        chat, made = prompt.chat, prompt.tokenised
        if leading >= len(chat.messages):
            return self._tokeniser.position(made, prompt.generation)
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

    def text_position(self, prompt: ChatPrompt, char: int) -> int:
        return self._tokeniser.position(prompt.tokenised, char)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._decode(list(ids)))

    def _refuse_too_long(self, text: str, param: str) -> None:
        if self._context is not None and self._codec.exceeds(text, self._context):
            raise ContextLengthExceeded(
                f"prompt is too long: {len(text)} characters, far more than {self._context} tokens",
                param=param,
            )

    def _breakpoint(self, chat: Chat, made: Tokenised, generation: int) -> int | None:
        leading = chat.breakpoint
        if leading is None:
            return None
        if leading >= len(chat.messages):
            return generation
        shared = self._renderer.shared_characters(chat, leading, made.rendered)
        shared = spliced_position(shared, made.splices)
        if len(made.at):
            return made.position_before(shared)
        return self._tokeniser.position(made, shared)

    def _opens_thinking(self, generation: int, made: Tokenised, marks: tuple[int, ...]) -> bool:
        start, end = self._think
        if not start or not end:
            return False
        tail = made.text[min(generation, made.char_before(marks[-1] if marks else 0)) :]
        return tail.rfind(start) > tail.rfind(end)

    def _shown_call(self, value: str) -> str:
        function = {"name": NAME, "arguments": {KEY: value}}
        call = {"id": LONG_ID, "type": "function", "function": function}
        return self._probe([_ASKED, {"role": "assistant", "content": "", "tool_calls": [call]}])

    def _probe(self, messages: list[Message]) -> str:
        try:
            return self._renderer.probe(messages, tools=True)
        except MlxcacheError:
            return ""


class ResultForms:
    """Tool results of one owner as a reply would repeat them, as token ids. Thread-safe.

    That is without the line numbers that the result showed, and in JSON with escapes, if `escaped`;
    see `guess.forms.reply_form`. A form is made once per result.
    """

    def __init__(self, encode: Callable[[str], Tokens], *, escaped: bool):
        self.escaped = escaped
        self._encode = encode
        self._made: LRU[str, tuple[str, Tokens]] = LRU(
            _FORM_BYTES, lambda made: 2 * len(made[0]) + made[1].nbytes
        )

    def learn(self, messages: Messages) -> None:
        """Make the form of each tool result in `messages` for which none is kept. Blocks."""
        for text in _results(messages):
            if self._made.get(text) is None:
                form = reply_form(text, escaped=self.escaped)
                self._made.put(text, (text, NO_TOKENS if form is None else self._encode(form)))

    def of(self, messages: Messages) -> Mapping[str, Tokens]:
        """Return the token ids that `learn` made, by result text, where the text changes."""
        found = ((text, self._made.get(text)) for text in _results(messages))
        return {text: made[1] for text, made in found if made is not None and len(made[1])}


def _results(messages: Messages) -> list[str]:
    texts = (m.get("content") for m in messages if m.get("role") == "tool")
    return [text for text in texts if isinstance(text, str)]
