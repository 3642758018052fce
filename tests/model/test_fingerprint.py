"""The namespace stands for content: another content, another namespace; names do not matter."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from mlxcache.errors import ModelError
from mlxcache.model import fingerprint as module
from mlxcache.model.fingerprint import fingerprint

WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "rope_theta": 10000.0}')
    (folder / WEIGHTS).write_bytes(bytes(range(256)) * 100)
    return folder


@pytest.fixture
def memo(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "weights.json"


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files made a moment ago count as old enough to be remembered."""
    monkeypatch.setattr(module, "_SETTLED_NS", 0)


def of(
    model: Path,
    memo: Path,
    adapter: Path | None = None,
    layout_key: str = "f32",
    kv_format: int = 1,
) -> str:
    return fingerprint(
        model, adapter=adapter, memo=memo, layout_key=layout_key, kv_format=kv_format
    )


def flip(file: Path, at: int = 77) -> None:
    with file.open("r+b") as out:
        out.seek(at)
        byte = out.read(1)[0]
        out.seek(at)
        out.write(bytes([byte ^ 1]))


def adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"rank": 8}')
    (folder / "adapters.safetensors").write_bytes(b"adapter" * 9)
    return folder


def test_a_name_or_a_place_changes_nothing(model: Path, memo: Path, tmp_path: Path) -> None:
    twin = shutil.copytree(model, tmp_path / "elsewhere" / "renamed")
    assert of(model, memo) == of(twin, memo)
    assert len(bytes.fromhex(of(model, memo))) == 16


def test_any_changed_content_changes_it(model: Path, memo: Path, tmp_path: Path) -> None:
    seen = {of(model, memo)}
    flip(model / WEIGHTS)
    seen.add(of(model, memo))
    (model / "config.json").write_text('{"model_type": "llama", "rope_theta": 20000.0}')
    seen.add(of(model, memo))
    (model / "hf_quant_config.json").write_text('{"quantization": 4}')
    seen.add(of(model, memo))
    (model / "model-2.safetensors").write_bytes(b"more")
    seen.add(of(model, memo))
    lora = adapter(tmp_path / "lora")
    seen.add(of(model, memo, lora))
    flip(lora / "adapters.safetensors", 3)
    seen.add(of(model, memo, lora))
    (lora / "adapter_config.json").write_text('{"rank": 16}')
    seen.add(of(model, memo, lora))
    seen.add(of(model, memo, lora, layout_key="f16"))
    assert len(seen) == 9


def test_versions_change_it(model: Path, memo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {of(model, memo)}
    seen.add(of(model, memo, kv_format=2))
    monkeypatch.setattr(module, "version", lambda _: "0.99")
    seen.add(of(model, memo))
    assert len(seen) == 3


def test_the_spelling_of_the_configuration_changes_nothing(model: Path, memo: Path) -> None:
    before = of(model, memo)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    assert of(model, memo) == before


def test_code_counts_where_the_model_runs_it(model: Path, memo: Path) -> None:
    (model / "own.py").write_text("Model = 1")
    idle = of(model, memo)
    (model / "own.py").write_text("Model = 2")
    assert of(model, memo) == idle
    (model / "config.json").write_text('{"model_type": "llama", "model_file": "own.py"}')
    first = of(model, memo)
    (model / "own.py").write_text("Model = 3")
    assert len({idle, first, of(model, memo)}) == 3


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    digest = hashlib.file_digest

    def noted(file: Any, kind: str) -> Any:
        names.append(file.name)
        return digest(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", noted)
    return names


def test_a_hub_blob_is_known_by_its_name(
    model: Path, memo: Path, tmp_path: Path, read: list[str]
) -> None:
    plain = of(model, memo)
    content = (model / WEIGHTS).read_bytes()
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    blob = blobs / hashlib.sha256(content).hexdigest()
    blob.write_bytes(content)
    (model / WEIGHTS).unlink()
    (model / WEIGHTS).symlink_to(blob)
    read.clear()
    assert of(model, memo) == plain
    assert read == []


@pytest.mark.usefixtures("settled")
def test_weights_are_read_once(model: Path, memo: Path, read: list[str]) -> None:
    first = of(model, memo)
    assert len(read) == 1
    assert stat.S_IMODE(memo.stat().st_mode) == 0o600
    assert stat.S_IMODE(memo.parent.stat().st_mode) == 0o700
    assert of(model, memo) == first
    assert len(read) == 1
    at = (model / WEIGHTS).stat()
    flip(model / WEIGHTS)
    os.utime(model / WEIGHTS, ns=(at.st_atime_ns, at.st_mtime_ns))  # an edit that hides itself
    assert of(model, memo) != first
    assert len(read) == 2


def test_a_file_that_changed_a_moment_ago_is_not_remembered(model: Path, memo: Path) -> None:
    of(model, memo)
    assert json.loads(memo.read_text())["files"] == {}


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"version": 1, "files": 3}', b"\xff" * 9])
def test_a_damaged_memo_is_made_anew(model: Path, memo: Path, damage: bytes) -> None:
    first = of(model, memo)
    good = memo.read_bytes()
    memo.write_bytes(damage)
    assert of(model, memo) == first
    assert memo.read_bytes() == good


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("entry", [None, [], [1, 2], "x", ["a" * 64], {"a": 1}])
def test_a_damaged_entry_is_not_believed(model: Path, memo: Path, entry: object) -> None:
    first = of(model, memo)
    value = json.loads(memo.read_text())
    value["files"] = dict.fromkeys(value["files"], entry)
    memo.write_text(json.dumps(value))
    assert of(model, memo) == first


@pytest.mark.usefixtures("settled")
def test_files_that_are_gone_are_forgotten(model: Path, memo: Path, tmp_path: Path) -> None:
    of(shutil.copytree(model, tmp_path / "other"), memo)
    shutil.rmtree(tmp_path / "other")
    of(model, memo)
    assert list(json.loads(memo.read_text())["files"]) == [str((model / WEIGHTS).resolve())]


@pytest.mark.usefixtures("settled")
def test_a_memo_that_cannot_be_written_costs_only_time(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert of(model, tmp_path / "file" / "memo.json") == of(model, tmp_path / "memo.json")


def test_what_cannot_be_read_is_named(model: Path, memo: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere.*cannot be read"):
        of(model, memo, tmp_path / "nowhere")
    (model / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        of(model, memo)


def test_a_draft_makes_another_namespace(model: Path, memo: Path, tmp_path: Path) -> None:
    draft = Path(shutil.copytree(model, tmp_path / "draft"))
    flip(draft / WEIGHTS)

    def pair() -> str:
        return fingerprint(
            model, adapter=None, memo=memo, layout_key="f32", kv_format=1, draft=draft
        )

    alone, first = of(model, memo), pair()
    flip(draft / WEIGHTS)
    second = pair()
    flip(draft / WEIGHTS)
    assert len({alone, of(draft, memo), first, second}) == 4
    draft = draft.rename(tmp_path / "elsewhere")
    assert pair() == first
