"""What a session is about in RAM, whatever else its label is used for."""

from __future__ import annotations

import numpy as np

from mlxcache.cache.main_conversation import (
    MAX_LABELS,
    MAX_SIDE_REQUESTS,
    CacheHints,
    MainConversations,
)
from mlxcache.store.leaves import SETTLED_TURNS
from mlxcache.tree.prefix_tree import PrefixTree

HEAD, ANCHOR = 20, 30


class Talk:
    """Requests of labels, each noted as it ends."""

    def __init__(self) -> None:
        self.tree, self.mains = PrefixTree(1), MainConversations()

    def ids(self, who: int, length: int, head: int = 0):
        made = np.random.default_rng(who).integers(0, 1 << 30, 10_000, dtype=np.int32)
        made[:HEAD] = head or who
        return made[:length]

    def ask(self, who: int, length: int, label: str | None = "s", head: int = 0) -> None:
        ids = self.ids(who, length, head)
        claim = CacheHints(ANCHOR, HEAD, label)
        self.mains.note_end(ids, claim, self.tree.insert(ids, object(), ANCHOR))

    def main(self, label: str | None = "s") -> int:
        """The tokens of the main conversation that a side request renews."""
        nodes = self.mains.main_beside(self.ids(999, 50), CacheHints(ANCHOR, HEAD, label))
        return nodes[-1].end if nodes else 0


def test_the_first_conversation_is_the_main_one_however_long_others_are():
    """Sub-agents of many turns leave it where it is; so does a title."""
    talk = Talk()
    for length in (1000, 1100):
        talk.ask(1, length)
    for length in range(2000, 4000, 100):
        talk.ask(2, length)
    talk.ask(3, 40)
    assert talk.main() == 1100
    talk.ask(1, 1200)
    assert talk.main() == 1200


def test_a_title_that_came_first_gives_way():
    """It is far shorter, and nobody went on with it."""
    talk = Talk()
    talk.ask(3, 60)
    assert talk.main() == 60
    talk.ask(1, 1000)
    talk.ask(3, 60)
    assert talk.main() == 1000


def test_a_conversation_that_was_taken_for_a_title_goes_on_after_all():
    """A short first turn, then a large sub-agent."""
    talk = Talk()
    talk.ask(1, 100)
    talk.ask(2, 900)
    assert talk.main() == 900
    talk.ask(1, 150)
    talk.ask(2, 1000)
    assert talk.main() == 150


def test_after_a_compaction_what_goes_on_under_the_same_head_is_the_main_one():
    """Not at once: a sub-agent may share the head."""
    talk = Talk()
    for length in range(2000, 2500, 100):
        talk.ask(1, length, head=7)
    for turn in range(SETTLED_TURNS):
        assert talk.main() == 2400
        talk.ask(2, 600 + turn, head=7)
    assert talk.main() == 600 + SETTLED_TURNS - 1


def test_no_label_and_no_turns_renew_nothing():
    """Nor does the main conversation itself, which is used anyway."""
    talk = Talk()
    talk.ask(1, 1000, None)
    talk.ask(1, 1000)
    assert talk.main(None) == 0
    assert talk.main("other") == 0
    assert not talk.mains.main_beside(talk.ids(1, 1200), CacheHints(ANCHOR, HEAD, "s"))


def test_a_label_that_everybody_uses_keeps_nothing_for_ever():
    """One that a program gives to all it asks; labels themselves are forgotten too."""
    talk = Talk()
    talk.ask(1, 1000)
    for other in range(MAX_SIDE_REQUESTS):
        assert talk.main() == 1000
        talk.ask(2 + other, 60)
    assert talk.main() == 0
    for other in range(MAX_LABELS):
        talk.ask(5, 70, f"t{other}")
    assert talk.main("t0") == 70
    assert len(talk.mains) == MAX_LABELS
