"""Folders of models: local paths, downloads from the Hub, and their errors."""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
from huggingface_hub import constants, errors

from mlxcache.config.models import model_id
from mlxcache.errors import ModelError
from mlxcache.model import hub
from mlxcache.model.hub import resolve
from tests.fake_hub import FakeHub


def test_a_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (str(tmp_path / "model"), "model", "./model", "~/model"):
        assert resolve(name).resolve() == tmp_path / "model"


@pytest.mark.parametrize("name", ["/no/such", "./nothing", "~/nothing", "a/b/c", "c:\\models\\x"])
def test_a_path_that_is_not_there_is_not_looked_up(name: str) -> None:
    """A typing error in a path must not become a request to the Hub."""
    with pytest.raises(ModelError, match="no folder"):
        resolve(name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    """People try GGUF files."""
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ModelError, match="takes the folder"):
        resolve(str(tmp_path / "x.gguf"))


def test_offline_without_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"not in the local cache.*--model /path") as caught:
        resolve("owner/name")
    assert str(tmp_path) in str(caught.value)


def test_a_name_that_the_hub_would_not_take() -> None:
    with pytest.raises(
        ModelError, match=r"neither an existing folder nor a Hub id.*serves the built-in demo"
    ):
        resolve("what is this?")


def _response(status: int) -> httpx2.Response:
    return httpx2.Response(status, request=httpx2.Request("GET", "https://huggingface.co/x"))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (errors.GatedRepoError("", response=_response(403)), "accept its terms.*hf auth login"),
        (errors.RepositoryNotFoundError("", response=_response(404)), "no model owner/name"),
        (errors.RevisionNotFoundError("", response=_response(404)), "no revision v9"),
        (errors.IncompleteSnapshotError("", snapshot_path="x"), "only in part"),
        (errors.HfHubHTTPError("500 down", response=_response(500)), "downloaded: 500 down"),
        (OSError(errno.ENOSPC, "no space"), "disk is full"),
        (ConnectionResetError("reset"), "could not be downloaded: reset"),
    ],
)
def test_what_the_hub_answers_becomes_a_sentence(
    error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    monkeypatch.setattr(hub, "_find_large", lambda *_: ())  # asks the Hub
    with pytest.raises(ModelError, match=sentence) as caught:
        resolve("owner/name", "v9")
    assert caught.value.__cause__ is error


FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(range(256)) * 4096,
    "pytorch_model.bin": b"not wanted",
}


def test_a_download_reports_its_bytes(
    local_hub: FakeHub, capfd: pytest.CaptureFixture[str]
) -> None:
    """Through the Hub's own client: what mlx-lm needs arrives, and progress ends at the total."""
    local_hub.files = FILES
    seen: list[tuple[int, int]] = []
    path = resolve("owner/name", progress=lambda done, total: seen.append((done, total)))
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not (path / "pytorch_model.bin").exists()
    wanted = len(FILES["config.json"]) + len(FILES["model.safetensors"])
    assert seen[-1] == (wanted, wanted)
    assert all(done <= total for done, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert capfd.readouterr().err == ""
    assert model_id(str(path)) == "owner/name"


def test_what_was_downloaded_serves_without_the_hub(local_hub: FakeHub) -> None:
    local_hub.files = FILES
    path = resolve("owner/name")
    local_hub.stop()
    assert resolve("owner/name") == path


def test_what_is_not_here_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    assert hub.here(str(tmp_path)) == tmp_path
    assert hub.here("owner/name") is None
    with pytest.raises(ModelError, match="There is no folder"):
        hub.here("./absent")


def test_an_outline_is_the_configuration_and_the_size_of_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(model: str, name: str, revision: str | None) -> str:
        assert (model, name, revision) == ("owner/name", "config.json", None)
        return str(tmp_path / name)

    class Api:
        def model_info(self, *_: object, **__: object) -> SimpleNamespace:
            sizes = {"model-1.safetensors": 5, "model-2.safetensors": 7, "tokenizer.json": 100}
            files = [SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
            return SimpleNamespace(siblings=files)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    monkeypatch.setattr(hub, "HfApi", Api)
    assert hub.outline("owner/name") == (tmp_path, 12)


# --- a Hub out of reach is reported within seconds, in one sentence -------------------------------


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("ALL_PROXY", "HTTP_PROXY", "all_proxy", "http_proxy"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as there:
        yield f"http://127.0.0.1:{there.getsockname()[1]}"


def told(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, float]:
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
