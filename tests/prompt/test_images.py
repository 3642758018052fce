"""Image tokens are in place, and their ids depend on the content of the images."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.errors import BadRequest, GenerationFailed
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.images import IMAGE_RESULT, ImageTemplate, ids_with_digests
from mlxcache.prompt.template import Template, Traits
from mlxcache.types import NO_TOKENS, Chat, Image, ImageSpan, token_ids
from tests.prompt import kinds, templates

TOKEN, BEFORE, BEHIND = "[INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"
_TEXT = "{{- m.content -}}"
_PARTS = """{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for part in m.content -%}
{{- part.text if part.type == 'text' else ('[INST]' if TEST else '') -}}
{%- endfor -%}{%- endif -%}"""


def source(test: str = "part.type == 'image'", *, start: str = "") -> str:
    return start + templates.chatml().replace(_TEXT, _PARTS.replace("TEST", test))


SHOWN = _PARTS.replace("TEST", "part.type == 'image'")

GOLDEN = [100, 101, -1722689523, -1280443958, -1113952247, -1720832774, -72030972, 107, 108, 109]

ALTERNATES = """\
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{- raise_exception('no') -}}{%- endif -%}
{%- endfor -%}"""


class ImageProcessor:
    """An image of n bytes has n tokens, between two marks."""

    image_token = TOKEN

    def __init__(self, token_id: int):
        self.token_id = token_id

    def text(self, image: Image) -> str:
        if not image.data:
            raise BadRequest("an empty image")
        return BEFORE + TOKEN * len(image.data) + BEHIND

    def grid(self, image: Image) -> tuple[int, int] | None:
        return None if len(image.data) % 2 else (2, len(image.data) // 2)


def image(show: str, size: int = 5) -> Image:
    return Image(b"x" * size, hashlib.sha256(show.encode()).digest())


def user(*content: str | Image) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def make(template: str) -> PromptBuilder:
    tokenizer = kinds.tokenizer("byte_level", template)
    pictures = ImageProcessor(tokenizer.get_added_vocab()[TOKEN])
    return PromptBuilder(tokenizer, processor=pictures)


BUILDER = make(source())
ALTERNATING = make(source(start=ALTERNATES))
NATIVE = make(
    templates.chatml().replace(_TEXT, SHOWN).replace("+ m.content +", f"-}}}}{SHOWN}{{{{-")
)
"""It renders images in tool results, as Qwen's templates do."""


@pytest.mark.parametrize("test", ["part.type == 'image'", "part.type == 'image_url'", "true"])
def test_whichever_form_the_template_knows_is_used(test: str) -> None:
    builder = make(source(test))
    assert builder.takes_images
    (span,) = builder.chat(Chat([user("See ", image("a"), "?")])).images
    assert span.end - span.start == 5


@pytest.mark.parametrize("template", [templates.chatml(), source("false"), templates.GEMMA])
def test_a_template_that_writes_no_image_takes_none(
    template: str, caplog: pytest.LogCaptureFixture
) -> None:
    builder = make(template)
    assert not builder.takes_images
    assert "images disabled" in caplog.text
    with pytest.raises(BadRequest, match="no images"):
        builder.chat(Chat([user("See ", image("a"))]))
    assert builder.chat(Chat([{"role": "user", "content": "Hi"}])).tokens is None


def test_the_model_is_fed_the_tokens_and_the_cache_knows_the_images() -> None:
    prompt = BUILDER.chat(Chat([user("a ", image("1"), " b ", image("2", 3), " c")]))
    tokens = BUILDER.text(
        "<|im_start|>user\na "
        + f"{BEFORE}{TOKEN * 5}{BEHIND} b {BEFORE}{TOKEN * 3}{BEHIND} c"
        + "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.fed.tolist() == tokens.ids.tolist()
    assert [s.end - s.start for s in prompt.images] == [5, 3]
    patches = {i for s in prompt.images for i in range(s.start, s.end)}
    around = {at for s in prompt.images for at in (s.start - 1, s.end)}
    for i, (known, fed) in enumerate(zip(prompt.ids, prompt.fed, strict=True)):
        assert (known < 0) == (i in patches | around)
        assert known < 0 or known == fed
    assert max(prompt.marks) < len(prompt.ids)


def test_two_images_of_one_size_share_no_id() -> None:
    one, other = (BUILDER.chat(Chat([user(image(show), "?")])) for show in "ab")
    assert one.fed.tolist() == other.fed.tolist()
    (span,) = one.images
    inside = slice(span.start - 1, span.end + 1)
    assert not (one.ids[inside] == other.ids[inside]).any()
    assert np.array_equal(one.ids[span.end + 1 :], other.ids[span.end + 1 :])


def test_the_ids_of_an_image_are_the_same_in_every_process() -> None:
    """They are on disk, and there they have to be found again."""
    ids = token_ids(range(100, 110))
    span = ImageSpan(3, 6, Image(b"", bytes(range(32))))
    known = ids_with_digests(ids, [span])
    assert known.tolist() == GOLDEN
    assert ids.tolist() == list(range(100, 110))


def test_images_side_by_side_keep_their_own_ids() -> None:
    ids = token_ids([7] * 8)
    first, second = (Image(b"", bytes([i]) * 32) for i in (1, 2))
    alone = ids_with_digests(ids, [ImageSpan(0, 4, first)])
    both = ids_with_digests(ids, [ImageSpan(0, 4, first), ImageSpan(4, 8, second)])
    assert (both < 0).all()
    assert (alone[:5] < 0).all()
    assert not (both[4:] == ids_with_digests(ids, [ImageSpan(0, 4, first)])[4:]).all()


def test_the_token_in_a_persons_text_is_no_image() -> None:
    prompt = BUILDER.chat(Chat([user(f"{TOKEN} is text, ", image("1"), f" also {TOKEN}")]))
    (span,) = prompt.images
    token = kinds.tokenizer("byte_level", source()).get_added_vocab()[TOKEN]
    assert np.count_nonzero(prompt.fed == token) == span.end - span.start == 5


@settings(max_examples=30, deadline=None)
@given(
    turns=st.lists(
        st.lists(st.sampled_from(["text ", TOKEN, "\n\n", image("a"), image("b", 2)]), min_size=1),
        min_size=1,
        max_size=5,
    ),
    alternates=st.booleans(),
)
def test_a_turn_up_to_its_last_mark_starts_the_next_turn(
    turns: list[list[str | Image]], alternates: bool
) -> None:
    builder = ALTERNATING if alternates else BUILDER
    messages: list[dict[str, Any]] = []
    before = NO_TOKENS
    for turn in turns:
        messages.append(user(*turn))
        prompt = builder.chat(Chat(messages), "s")
        assert prompt.ids[: len(before)].tolist() == before.tolist()
        assert len(prompt.images) == sum(
            isinstance(part, Image) for m in messages[::2] for part in m["content"]
        )
        before = prompt.ids[: prompt.marks[-1]]
        messages.append(assistant("So."))


def looked(*results: list[str | Image] | str) -> list[dict[str, Any]]:
    calls = [
        {"id": f"c{i}", "type": "function", "function": {"name": "look", "arguments": {}}}
        for i in range(len(results))
    ]
    return [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *(
            {"role": "tool", "tool_call_id": f"c{i}", "content": content}
            for i, content in enumerate(results)
        ),
    ]


def shown(builder: PromptBuilder, *messages: dict[str, Any]) -> str:
    """The prompt behind the calls, without the framing of turns; each image is its size."""
    prompt = builder.chat(Chat(list(messages)))
    text = builder.decode(prompt.fed.tolist())
    for size in (5, 3):
        text = text.replace(f"{BEFORE}{TOKEN * size}{BEHIND}", f"({size})")
    return text.partition("</tool_call><|im_end|>\n")[2].replace("<|im_start|>", "")


def test_images_of_results_are_where_the_template_shows_them() -> None:
    messages = looked(["one ", image("1"), " two"], [image("2", 3)], "three")
    assert shown(NATIVE, *messages) == (
        "user\n<tool_response>\none (5) two\n</tool_response>\n<tool_response>\n(3)\n"
        "</tool_response>\n<tool_response>\nthree\n</tool_response><|im_end|>\nassistant\n"
    )


@pytest.mark.parametrize("builder", [BUILDER, ALTERNATING], ids=["any", "alternating"])
def test_or_begin_the_message_behind_them(builder: PromptBuilder) -> None:
    """A template that takes no images in results does not see them there."""
    messages = looked(["one", image("1"), "two"], [image("2", 3)])
    results = (
        "user\n<tool_response>\none\n\ntwo\n</tool_response>\n"
        f"<tool_response>\n{IMAGE_RESULT}\n</tool_response><|im_end|>\n"
    )
    if builder is BUILDER:
        seen = f"{results}user\n(5)(3)"
        assert shown(builder, *messages) == f"{seen}<|im_end|>\nassistant\n"
        said = {"role": "user", "content": "And?"}
        assert shown(builder, *messages, said) == f"{seen}And?<|im_end|>\nassistant\n"
        more = shown(builder, *messages, assistant("So."), said)
        assert more.startswith(f"{seen}<|im_end|>\nassistant\nSo.")
    assert builder.chat(Chat(messages)).images[1].image == image("2", 3)


def test_messages_that_a_template_wants_as_one_keep_their_images_in_order() -> None:
    chat = Chat(
        [user("a ", image("1")), user(image("2", 3), " b"), {"role": "user", "content": "c"}]
    )
    prompt = ALTERNATING.chat(chat)
    assert [s.image for s in prompt.images] == [image("1"), image("2", 3)]


def test_a_breakpoint_behind_an_image_is_behind_its_tokens() -> None:
    messages = [user("a ", image("1")), assistant("b"), user("c")]
    prompt = BUILDER.chat(Chat(messages, breakpoint=1))
    assert prompt.breakpoint is not None
    assert prompt.images[0].end < prompt.breakpoint < len(prompt.ids) - 5


def test_an_image_where_the_template_leaves_it_out_is_a_bad_request() -> None:
    builder = make(source("loop.first or messages | length == 1"))
    with pytest.raises(BadRequest, match="no place for an image"):
        builder.chat(Chat([user("a"), assistant("b"), user("c ", image("1"))]))


def test_what_the_processor_refuses_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="an empty image"):
        BUILDER.chat(Chat([user("a", Image(b"", b""))]))


def test_the_refused_image_is_named_by_its_place() -> None:
    given = [user(image("1"), Image(b"", b"", "messages[0].content[1]"), image("2"))]
    with pytest.raises(BadRequest, match=r"^messages\[0\]\.content\[1\]: an empty image") as error:
        BUILDER.chat(Chat(given))
    assert error.value.param == "messages[0].content[1]"


def test_tokens_that_are_not_where_they_should_be_are_an_error() -> None:
    pictures = ImageProcessor(9)
    template = Template(kinds.tokenizer("byte_level", source()))
    template_images = ImageTemplate(template, pictures, {}, Traits())
    for ids in ([1, 9, 9, 1], [1, 9, 9, 9, 1], [1, 9, 9, 2, 9, 1], [1, 9, 9, 9]):
        wanted = 4 if ids.count(9) == 3 and ids[-1] == 1 and 2 not in ids else 3
        with pytest.raises(GenerationFailed):
            template_images.locate(token_ids(ids), [image("1", wanted)])
