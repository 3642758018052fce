"""The smoke test of a real model, on toys."""

from __future__ import annotations

from typing import Any

import pytest

from tests import smoke


@pytest.mark.slow
@pytest.mark.parametrize("thinking", [False, True])
def test_a_server_passes_it(thinking: bool, toy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Real servers, with and without a template that drops thinking."""
    assert smoke.main(["--model", str(toy("llama", thinking=thinking))]) == 0
    assert "all counts are exact" in capsys.readouterr().out
