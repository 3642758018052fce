"""Positions of tokens in prompts with images, for models whose positions have three axes.

The three are time, row and column. A token of text has the same position on all of them. All tokens
of an image have one time, and rows and columns by their places in its grid. The text behind an
image goes on after the largest position in it, so an image of 8 rows and 5 columns moves what
follows by 8 positions, not by 40. Calls no MLX.

```text
token       a  b  [ image: 2 rows, 3 columns ]  c  d
time        0  1   2  2  2  2  2  2             5  6
row         0  1   2  2  2  3  3  3             5  6
column      0  1   2  3  4  2  3  4             5  6
```
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mlxcache.types import ImageSpan


def shift_of(spans: Sequence[ImageSpan]) -> int:
    """Return how far the images `spans` shift the position of a token of text behind them.

    The shift is the token's position, which is the same on all three axes, minus the number of
    tokens before it. It is negative if the images take fewer positions than they have tokens. An
    image without a grid takes as many positions as it has tokens.
    """
    return sum(max(span.grid) - (span.end - span.start) for span in spans if span.grid is not None)


def positions_of(spans: Sequence[ImageSpan], start: int, end: int) -> npt.NDArray[np.int32]:
    """Return the positions of the tokens [start, end) of a prompt, shape (end - start, 3).

    The three numbers of a token are its positions on the axes time, row and column, in this order.
    `spans`: all images of the prompt, in order.
    """
    found = np.repeat(np.arange(start, end, dtype=np.int32)[:, None], 3, axis=1)
    shift = 0
    for span in spans:
        if span.grid is None:
            continue
        first, last = (min(max(at, start), end) - start for at in (span.start, span.end))
        places = np.arange(first, last, dtype=np.int32) + (start - span.start)
        rows, columns = np.divmod(places, span.grid[1])
        axes = [np.zeros_like(rows), rows, columns]
        found[first:last] = span.start + shift + np.stack(axes, axis=1)
        more = shift_of([span])
        found[last:] += more
        shift += more
    return found
