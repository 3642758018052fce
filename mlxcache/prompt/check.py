"""Whether tokenising from an anchor on gives what tokenising all of a text gives."""

from __future__ import annotations

from collections.abc import Sequence

from mlxcache.common_prefix import common_characters
from mlxcache.prompt.recent import Tokeniser
from mlxcache.prompt.tokenizer import Added

_PIECES = (
    "user\nplain words here",
    "\n",
    "  two blanks before, two behind  ",
    "def f(x):\n\treturn x  # 12345\n\n",
    "1234567890",
    "\u65e5\u672c\u8a9e \u00e9e\u0301 \U0001f980\U0001f469\u200d\U0001f4bb",
    " ",
    "\u0301combining first\r\n",
    "<tag attr='1'>&amp;</tag> ...'s",
)


def incremental_holds(tokeniser: Tokeniser, controls: Sequence[Added], rendered: str) -> bool:
    """Compare both ways on texts made of awkward pieces around control tokens.

    `rendered` is a conversation as the template renders it; its control tokens come first.
    """
    inside = [token.text for token in controls if token.text in rendered]
    others = [token.text for token in controls if token.text not in rendered]
    for a, b in _pairs(inside[:12] + others[:4]):
        text = rendered
        for piece, token in zip(_PIECES, (a, b) * len(_PIECES), strict=False):
            longer = text + piece + token + piece
            old = tokeniser.full(text)
            new = tokeniser.extend(old, common_characters(text, longer), longer)
            if new is not None and new.ids.tolist() != tokeniser.full(longer).ids.tolist():
                return False
            text = longer
    return True


def _pairs(tokens: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(tokens, [*tokens[1:], *tokens[:1]], strict=True))
