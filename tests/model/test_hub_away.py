"""A Hub out of reach is reported within seconds, in one sentence."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlxcache.errors import ModelError
from mlxcache.model import hub


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of one that takes connections and answers nothing."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("ALL_PROXY", "HTTP_PROXY", "all_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as there:
        yield f"http://127.0.0.1:{there.getsockname()[1]}"


def told(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, float]:
    """What is said of a model that is not here, and after how many seconds."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    begin = time.monotonic()
    with pytest.raises(ModelError) as caught:
        hub.outline("owner/name")
    return str(caught.value), time.monotonic() - begin


def test_a_hub_that_cannot_be_reached_is_asked_once(
    silent: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither where nobody listens, nor where nobody answers, nor where it is not to be asked."""
    monkeypatch.setattr(hub, "ANSWER_S", 0.5)
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    says = "owner/name is not in the local cache"
    for endpoint in ("http://127.0.0.1:9", silent):
        sentence, seconds = told(endpoint, monkeypatch)
        assert sentence.startswith(says)
        assert "the Hub cannot be reached" in sentence
        assert seconds < 3
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert told(silent, monkeypatch)[0].startswith(says)
    assert caplog.records == []
