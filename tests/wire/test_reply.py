"""A whole reply ends by itself, or its end is an error."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcache.errors import GenerationFailed, NotReady
from mlxcache.types import Finished
from mlxcache.wire.reply import finished_or_raise


@pytest.mark.parametrize(
    ("reason", "error"), [("cancelled", NotReady), ("error", GenerationFailed)]
)
def test_a_failed_or_cut_reply_raises(reason: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        finished_or_raise(Finished(reason, 1, 0, 0, 0))
    with pytest.raises(NotReady):
        finished_or_raise(None)
