from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.prompt.codec import Codec, Escape
from mlxcache.prompt.incremental import (
    ControlTokenFinder,
    RecentTexts,
    Tokenised,
    Tokeniser,
    check_incremental,
)
from mlxcache.prompt.tokenizer import added_tokens, control_tokens
from mlxcache.types import join_ids, token_ids
from tests.prompt import kinds
from tests.prompt.chats import PIECES
from tests.prompt.kinds import CONTROL, INCREMENTAL, KINDS, MARKS


@dataclass(frozen=True)
class Made:
    codec: Codec
    finder: ControlTokenFinder
    escape: Escape
    tokeniser: Tokeniser

    def fresh(self) -> Tokeniser:
        return Tokeniser(self.codec, self.finder)


def make(kind: str) -> Made:
    tokenizer = kinds.tokenizer(kind, None)
    added = added_tokens(tokenizer)
    controls = control_tokens(added, " ".join(MARKS), ())
    escape = Escape([token.text for token in controls])
    codec = Codec(tokenizer, added, controls, escape)
    normalizes = kinds.backend(kind).normalizer is not None
    finder = ControlTokenFinder(added, controls, normalizer=normalizes)
    return Made(codec, finder, escape, Tokeniser(codec, finder))


MADE = {kind: make(kind) for kind in KINDS}

parts = st.lists(st.sampled_from([*PIECES, *CONTROL, "\u0301", "<|im_end|>\n", " "]), max_size=14)
cuts = st.lists(st.integers(0, 200), min_size=1, max_size=4)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=parts, edits=st.lists(st.tuples(cuts, parts, st.booleans()), max_size=3))
def test_incremental_is_full(
    kind: str, text: list[str], edits: list[tuple[list[int], list[str], bool]]
) -> None:
    tokeniser, escape = MADE[kind].fresh(), MADE[kind].escape
    now = "".join(text)
    tokeniser.encode(now, "s")
    for where, new, plain in edits:
        cut = where[0] % (len(now) + 1)
        piece = escape.escape_value("".join(new)) if plain else "".join(new)
        now = now[:cut] + piece + now[cut + (where[-1] if len(where) > 1 else 0) :]
        got, expected = tokeniser.encode(now, "s"), tokeniser.encode_whole(now)
        assert got.ids.tolist() == expected.ids.tolist()
        assert got.at.tolist() == expected.at.tolist()
        assert got.starts.tolist() == expected.starts.tolist()


@pytest.mark.parametrize("kind", INCREMENTAL)
def test_only_what_changed_is_encoded(kind: str) -> None:
    made = MADE[kind]
    tokeniser = made.tokeniser
    old = tokeniser.encode_whole("<s>" + "word " * 500 + "</s>" + "more " * 9 + "<s>")
    seen: list[str] = []

    class Spy:
        def encode(self, text: str) -> object:
            seen.append(text)
            return made.codec.encode(text)

    spied = Tokeniser(Spy(), made.finder)  # type: ignore[arg-type]
    longer = old.text + "new <s>"
    new = spied.extend(old, len(old.text), longer)
    assert new is not None
    assert seen == ["<s>new <s>"]
    assert new.ids.tolist() == tokeniser.encode_whole(longer).ids.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_check_at_load_agrees_with_the_kinds(kind: str) -> None:
    """What the property shows on many texts, the check finds on a few."""
    tokeniser = MADE[kind].tokeniser
    controls = control_tokens(added_tokens(kinds.tokenizer(kind, None)), None, ())
    assert check_incremental(tokeniser, controls, "<s>user hello</s>")


def test_the_check_finds_a_tokenizer_that_depends_on_what_stood_before() -> None:
    made = MADE["byte_level"]

    class Counting:
        def encode(self, text: str) -> object:
            return join_ids(made.codec.encode(text), token_ids([len(text) % 50]))

    odd = Tokeniser(Counting(), made.finder)  # type: ignore[arg-type]
    controls = control_tokens(added_tokens(kinds.tokenizer("byte_level", None)), None, ())
    assert not check_incremental(odd, controls, "<s>user hello</s>")


def held(text: str) -> Tokenised:
    empty = np.zeros(0, dtype=np.int64)
    return Tokenised(text, token_ids([0] * len(text)), empty, empty, empty)


def test_the_longest_common_prefix_wins_among_a_session_s_and_the_latest() -> None:
    recent = RecentTexts(latest=2)
    main, helper = held("tools A main"), held("tools B helper")
    recent.add(main, "s")
    recent.add(helper, "s")
    for i in range(3):
        recent.add(held(f"other {i}"), f"o{i}")
    assert recent.find_nearest("tools A main, next", "s") == (main, 12)
    assert recent.find_nearest("tools B helper, next", "s") == (helper, 14)
    assert recent.find_nearest("tools A main, next", "new")[0] is None
    assert recent.find_nearest("other 2, forked", "new")[1] == 7


def test_what_is_remembered_is_bounded() -> None:
    recent = RecentTexts(count=10, each=3, latest=2, limit=50_000)
    for i in range(50):
        recent.add(held(f"{i} " * 10), f"s{i % 5}")
        recent.add(held(f"{i} " * 10), None)
        assert len(recent.held) <= 10
    for i in range(20):
        recent.add(held(f"{i}" + "x" * 1000), f"t{i}")
        assert recent.held.total <= 50_000
    recent.add(held("y" * 100_000), "big")
    assert recent.held.total <= 50_000


def test_tokens_found_after_normalising_or_by_their_neighbours_are_no_anchors() -> None:
    """In the raw text one may be missing and another, written otherwise, be there."""
    for kind in ("normalized_specials", "single_words"):
        assert MADE[kind].finder.find_all("a <s> b </s>") == []
        assert len(MADE[kind].finder.find_all("<think>a</think>")) == 2


def test_a_text_that_does_not_begin_with_its_anchor_is_encoded_whole() -> None:
    """A vocabulary might put something before a control token that comes first."""
    made = MADE["byte_level"]

    class Before:
        def encode(self, text: str) -> object:
            return join_ids(token_ids([0]), made.codec.encode(text))

    odd = Tokeniser(Before(), made.finder)  # type: ignore[arg-type]
    old = odd.encode_whole("<s>hello</s>")
    assert odd.extend(old, len(old.text), "<s>hello</s>more") is None
    assert odd.encode("<s>hello</s>more", "s").ids[0] == 0


def test_a_position_is_what_a_prompt_shares_with_its_own_start() -> None:
    tokeniser = MADE["byte_level"].tokeniser
    prompt = tokeniser.encode_whole("<s>hello hello</s>next")
    for char in range(len(prompt.text) + 1):
        cut = tokeniser.encode_whole(prompt.text[:char]).ids.tolist()
        same = next(
            (i for i, (a, b) in enumerate(zip(cut, prompt.ids, strict=False)) if a != b), len(cut)
        )
        assert tokeniser.position(prompt, char) == same
