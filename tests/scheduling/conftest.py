"""Fixtures of the tests of scheduling."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import ToyMaker
from tests.scheduling.failing_device import Judge, make_judges


@pytest.fixture(scope="module")
def judges(toy: ToyMaker) -> Callable[[str], Judge]:
    """A judge of each family of models; see `Judge`."""
    return make_judges(toy)
