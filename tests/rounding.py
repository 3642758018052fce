"""Tolerance for float32 results whose sums were added up in another order."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

EPSILON = 2.0**-23
"""Distance of the next float32 after 1."""

ROUNDINGS = 8192
"""Roundings on the way to one logit of a toy: 4 layers of 8 sums, each of up to 256 terms."""


def rounding(values: mx.array | np.ndarray) -> float:
    """Difference to expect between `values` and the same sums added up in another order.

    One rounding is off by epsilon / sqrt(12) of the value in the root mean square. The square root
    of their number of them adds up, and the largest of some hundred values is off by four of that.
    """
    return 4 * EPSILON * math.sqrt(ROUNDINGS / 12) * float(np.abs(np.array(values)).max())
