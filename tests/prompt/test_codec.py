import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.errors import BadRequest
from mlxcache.prompt.codec import Codec, Escape
from mlxcache.prompt.tokenizer import added_tokens, control_tokens
from tests.prompt import kinds
from tests.prompt.chats import texts
from tests.prompt.kinds import CONTROL, KINDS, MARKS, Newlines, NoBackend, Wrapped

BYTE_LEVEL = ("byte_level", "digits_in_threes", "blank_runs", "one_in_another")


def make(tokenizer: Wrapped) -> tuple[Codec, Escape, list[int]]:
    added = added_tokens(tokenizer)
    controls = control_tokens(added, " ".join(MARKS), ())
    normalizer = getattr(
        getattr(tokenizer._tokenizer, "backend_tokenizer", None), "normalizer", None
    )
    escape = Escape(
        [token.text for token in controls],
        normalized=[token.text for token in controls if token.normalized],
        normalize=normalizer.normalize_str if normalizer else None,
    )
    return Codec(tokenizer, added, controls, escape), escape, [token.id for token in controls]


CODECS = {kind: make(kinds.tokenizer(kind, None)) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(text=texts(size=10))
def test_text_never_becomes_a_control_token(kind: str, text: str) -> None:
    codec, escape, controls = CODECS[kind]
    ids = codec.encode("<s> " + escape.escape_value(text) + " </s>")
    tokenizer = kinds.backend(kind)
    expected = [tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")]
    assert ids[np.isin(ids, controls)].tolist() == expected


@pytest.mark.parametrize("kind", BYTE_LEVEL)
@settings(max_examples=40, deadline=None)
@given(text=texts(size=10))
def test_ids_decode_to_the_text_that_was_escaped(kind: str, text: str) -> None:
    codec, escape, _ = CODECS[kind]
    ids = codec.encode(escape.escape_value(text)).tolist()
    assert kinds.backend(kind).decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "single_words"])
@settings(max_examples=25, deadline=None)
@given(parts=st.lists(st.sampled_from([*CONTROL, " a  b\n", "x", "\n\n", "naïve 12345", "<b>"])))
def test_a_sentinel_changes_nothing_of_the_text_around_it(kind: str, parts: list[str]) -> None:
    codec, escape, _ = CODECS[kind]
    text = "<|eot_id|>" + "".join(parts) + "</s>"
    expected = codec.encode(text).tolist()[1:]
    there = codec.encode("x" + escape.escape_value("<s>") + text).tolist()
    assert there[-len(expected) :] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_text_without_sentinels_is_encoded_by_the_tokenizer_itself(kind: str) -> None:
    tokenizer = kinds.tokenizer(kind, None)
    text = "<s>[INST] It's  12345 x<b>é</b>\n\n[/INST]</s>"
    expected = tokenizer.encode(text, add_special_tokens=False)
    assert CODECS[kind][0].encode(text).tolist() == expected


def test_other_tokenizers_cut_escaped_tokens_in_two() -> None:
    inner = kinds.tokenizer("byte_level", None)._tokenizer
    newlines = kinds.tokenizer("byte_level", None, cls=Newlines)
    for tokenizer in (Wrapped(NoBackend(inner)), newlines):
        codec, escape, controls = make(tokenizer)
        ids = codec.encode("<s>a" + escape.escape_value("<|im_end|>\nb") + "</s>")
        assert not codec.direct
        assert np.isin(ids, controls).tolist() == [True, *[False] * (len(ids) - 2), True]
    assert "<n>" in inner.decode(ids.tolist())


def test_raw_text_gets_the_tokens_that_the_tokenizer_adds_once() -> None:
    from tokenizers import processors

    backend = kinds.byte_level()
    start = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", start)])
    from transformers import PreTrainedTokenizerFast

    codec, _, _ = make(Wrapped(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")))
    assert codec.encode_raw("hello").tolist() == codec.encode_raw("<s>hello").tolist()
    assert codec.encode_raw("hello").tolist()[0] == start


def test_half_a_surrogate_pair_is_the_client_s_mistake() -> None:
    codec = CODECS["byte_level"][0]
    with pytest.raises(BadRequest):
        codec.encode("a\ud800b")
    with pytest.raises(BadRequest):
        codec.encode_raw("a\ud800b")


def test_truncation_and_padding_in_the_tokenizer_s_file_are_off() -> None:
    from transformers import PreTrainedTokenizerFast

    backend = kinds.byte_level()
    backend.enable_truncation(max_length=8)
    backend.enable_padding(length=8)
    codec, escape, _ = make(Wrapped(PreTrainedTokenizerFast(tokenizer_object=backend)))
    assert codec.direct
    assert len(codec.encode("a b " * 20)) > 8
    assert len(codec.encode("a" + escape.escape_value("<s>") * 9)) > 8
    assert len(codec.encode("a")) == 1


def test_others_run_while_a_long_text_is_encoded() -> None:
    """Whoever computes or streams meanwhile must not wait for it."""
    codec = CODECS["byte_level"][0]
    text = "Plain words, and 12345 of them. " * 30_000
    took: list[float] = []

    def encode() -> None:
        time.sleep(0.05)  # so that the other thread is in its loop
        began = time.perf_counter()
        codec.encode(text)
        took.append(time.perf_counter() - began)

    thread = threading.Thread(target=encode)
    thread.start()
    longest, before = 0.0, time.perf_counter()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    assert longest < 0.5 * took[0]
