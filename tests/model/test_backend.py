"""Which library runs a model, and what is said where none can: without mlx-vlm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest

from mlxcache.errors import ModelError
from mlxcache.model import backend, fingerprint
from mlxcache.model.backend import (
    FAMILIES,
    INSTALL,
    VLM_VERSION,
    choose_backend,
    has_images,
    mlx_lm_has,
    takes_images,
)
from mlxcache.model.examine import examine
from mlxcache.model.hub import list_downloaded
from mlxcache.model.load import ModelSpec, fetch, load
from tests.conftest import ToyMaker
from tests.fake_hub import FakeHub
from tests.served import served
from tests.toys import tiny
from tests.toys.toy import make_toy

KINDS = sorted(kind for kind in FAMILIES if not mlx_lm_has({"model_type": kind}))


@pytest.fixture(params=[None, "0.7.9"], ids=["absent", "other"])
def unfit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr(backend, "vlm_version", lambda: request.param)
    found: str | None = request.param
    return found


@pytest.fixture
def folder(toy: ToyMaker, tmp_path: Path) -> Path:
    copied: Path = shutil.copytree(toy("llama"), tmp_path / "model")
    return copied


def edit(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("name", [*tiny.module_names(), "mistral", "deepseek_v41_text"])
def test_mlx_lm_runs_all_that_it_has(name: str, unfit: str | None) -> None:
    assert choose_backend({"model_type": name}, "a model") == "mlx-lm"
    assert name not in FAMILIES or FAMILIES[name].images


def test_a_name_by_architecture_is_mlx_lms(unfit: str | None) -> None:
    named = {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"]}
    assert choose_backend(named, "a model") == "mlx-lm"


@pytest.mark.parametrize("kind", KINDS)
def test_what_to_install_is_said(kind: str, unfit: str | None) -> None:
    with pytest.raises(ModelError) as caught:
        choose_backend({"model_type": kind}, "org/name")
    said = str(caught.value)
    assert said.startswith(f"org/name is of type {kind}, which needs mlx-vlm {VLM_VERSION}")
    assert said.endswith(INSTALL)
    assert (unfit or "not installed") in said


@pytest.mark.parametrize("kind", KINDS)
def test_the_tested_version_is_taken(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "vlm_version", lambda: VLM_VERSION)
    assert choose_backend({"model_type": kind}, "a model") == "mlx-vlm"


@pytest.mark.parametrize("kind", ["deepseek_v4", "gemma5", "a.b", "", "../x"])
def test_other_families_of_mlx_vlm_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the right version: some of its ports are wrong."""
    monkeypatch.setattr(backend, "vlm_version", lambda: VLM_VERSION)
    with pytest.raises(ModelError, match=r"none of the types that are tested with mlx-vlm"):
        choose_backend({"model_type": kind}, "a model")


@pytest.mark.parametrize(
    ("config", "library", "images", "sees"),
    [
        ({"model_type": "llama"}, "mlx-lm", True, False),
        ({"model_type": "muse_spark", "vision_config": {"patch_size": 14}}, "mlx-lm", False, True),
        ({"model_type": "muse_spark"}, "mlx-lm", False, False),
        ({"model_type": "qwen3_vl", "vision_config": {"depth": 2}}, "mlx-lm", True, False),
        ({"model_type": "qwen3_vl", "vision_config": {"depth": 2}}, "mlx-vlm", True, True),
        ({"model_type": "qwen3_vl", "vision_config": {"depth": 2}}, "mlx-vlm", False, False),
        ({"model_type": "minimax_m3", "vision_config": {"depth": 2}}, "mlx-vlm", True, False),
    ],
)
def test_images_are_told_by_the_configuration(
    config: dict[str, Any], library: backend.Backend, images: bool, sees: bool
) -> None:
    """`images`: the model's files have the weights of a vision tower."""
    assert takes_images(config, library, images=images) == sees


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_a_model_is_never_run_by_mlx_vlm(
    folder: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    """mlx-lm asks for permission first; mlx-vlm would not."""
    monkeypatch.setattr(backend, "vlm_version", lambda: VLM_VERSION)
    ran = folder.parent / "ran"
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nraise ValueError('mine')\n")
    edit(folder, model_type=KINDS[0], model_file="own.py")
    with pytest.raises(ModelError, match="mine" if trusted else "--trust-remote-code"):
        load(ModelSpec(str(folder), trust_remote_code=trusted))
    assert ran.exists() == trusted


def test_no_file_of_a_model_is_read_before_it_is_refused(folder: Path, unfit: str | None) -> None:
    (folder / "model.safetensors").write_bytes(b"damaged")
    edit(folder, model_type=KINDS[0])
    for attempt in (load, examine):
        with pytest.raises(ModelError, match=r"--no-deps mlx-vlm=="):
            attempt(ModelSpec(str(folder)))


@pytest.mark.parametrize("kind", [KINDS[0], "unheard_of"])
def test_nothing_is_downloaded_of_a_model_that_cannot_run(
    local_hub: FakeHub, unfit: str | None, kind: str
) -> None:
    files = {"model.safetensors": bytes(300_000), "tokenizer.json": b"{}"}
    local_hub.files = files | {"config.json": json.dumps({"model_type": kind}).encode()}
    spec = ModelSpec("owner/name")
    with pytest.raises(ModelError, match=f"owner/name is of type {kind}"):
        fetch(spec, lambda *_: None)
    assert set(local_hub.fetched) == {"config.json"}
    assert list_downloaded() == []
    local_hub.files = files | {"config.json": b'{"model_type": "llama"}'}
    fetch(spec, lambda *_: None)
    assert {*files, "config.json"} <= set(local_hub.fetched)


def test_the_namespace_has_the_backend_of_mlx_vlm_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(installed: str | None) -> str:
        for module in (backend, fingerprint):
            monkeypatch.setattr(module, "vlm_version", lambda: installed)
        memo = tmp_path / "memo.json"
        return fingerprint.fingerprint(folder, adapter=None, memo=memo, layout_key="", kv_format=1)

    plain = of(None)
    (folder / "more.safetensors").write_bytes(b"mlx-lm does not read this")
    assert of(VLM_VERSION) == plain
    edit(folder, model_type=KINDS[0])
    first = of(VLM_VERSION)
    (folder / "more.safetensors").write_bytes(b"mlx-vlm does")
    assert of(VLM_VERSION) != first
    first = of(VLM_VERSION)
    monkeypatch.setattr(backend, "VLM_VERSION", "0.7.11")
    assert of("0.7.11") != first


@pytest.mark.parametrize("installed", [None, "0.7.9", VLM_VERSION])
def test_mlx_vlm_runs_what_mlx_lm_feeds_no_images_to(
    installed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "vlm_version", lambda: installed)
    seeing = {"model_type": "qwen3_vl", "vision_config": {"depth": 1}}
    best = "mlx-vlm" if installed == VLM_VERSION else "mlx-lm"
    assert choose_backend(seeing, "a model", images=True) == best
    assert choose_backend(seeing, "a model") == "mlx-lm"
    for plain in (
        {"model_type": "qwen3_vl"},
        {"model_type": "qwen3_vl", "vision_config": {}},
        {"model_type": "qwen3", "vision_config": {"depth": 1}},
        seeing | {"model_file": "own.py"},
    ):
        assert choose_backend(plain, "a model", images=True) == "mlx-lm"


def test_a_folder_has_images_with_both_settings_and_weights(tmp_path: Path) -> None:
    """Conversions to text only keep the settings."""
    text = {"model.language_model.layers.0.weight": mx.zeros(2)}
    weights = tmp_path / "model.safetensors"
    mx.save_safetensors(str(weights), text | {"model.visual.patch.weight": mx.zeros(2)})
    assert not has_images(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert has_images(tmp_path)
    mx.save_safetensors(str(weights), text)
    assert not has_images(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"vision_tower.a": "model.safetensors"}}))
    assert has_images(tmp_path)
    for damaged in ("no JSON", "[]", '{"weight_map": []}', '{"weight_map": {"vision_tower": 1}}'):
        index.write_text(damaged)
        assert not has_images(tmp_path)
    mx.save_safetensors(str(weights), {"model.visual.patch.weight": mx.zeros(2)})
    index.write_text('{"metadata": {}}')  # lists nothing, so the weights are read
    assert has_images(tmp_path)


@pytest.fixture
def noticed(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """An environment in which an import of mlx-vlm leaves a file, and fails; that file."""
    fake, mark = tmp_path / "fake" / "mlx_vlm", tmp_path / "imported"
    fake.mkdir(parents=True)
    says = f"open({str(mark)!r}, 'w').close()\nraise ImportError('fake')\n"
    (fake / "__init__.py").write_text(says)
    paths = [str(fake.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}, mark


@pytest.mark.slow
def test_a_server_with_a_model_of_mlx_lm_never_imports_mlx_vlm(
    folder: Path, noticed: tuple[dict[str, str], Path], tmp_path: Path
) -> None:
    environ, mark = noticed
    flags = ("--model", str(folder), "--ram", "200MB", "--cache-dir", str(tmp_path / "cache"))
    with served(*flags, home=tmp_path, environ=environ) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 4
        assert server.stop() == 0
    assert not mark.exists()


@pytest.mark.parametrize(
    ("code", "imports"),
    [
        ("import mlxcache.embed", False),
        ("import mlxcache.api.app, mlxcache.cli.serve, mlxcache.model.load", False),
        (
            "import sys; sys.argv[1:] = ['--version']; from mlxcache.cli.main import main; main()",
            False,
        ),
        ("import mlxcache.model.vlm", True),
    ],
)
def test_programs_do_not_import_mlx_vlm(
    noticed: tuple[dict[str, str], Path], code: str, imports: bool
) -> None:
    """The last case shows that an import would be noticed."""
    environ, mark = noticed
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env=os.environ | environ,
        capture_output=True,
        text=True,
    )
    assert (done.returncode != 0) == imports, done.stderr
    assert mark.exists() == imports


def test_a_model_without_its_images_says_what_to_install(unfit: str | None, tmp_path: Path) -> None:
    path = make_toy(tmp_path / "model", "qwen3_vl", images=True, layers=2)
    assert load(ModelSpec(str(path))).unseen is None  # it has no weights of a vision tower
    tower = {"vision_tower.patch_embed.proj.weight": mx.zeros((2, 2))}
    mx.save_safetensors(str(path / "model-2.safetensors"), tower)
    loaded = load(ModelSpec(str(path)))
    assert loaded.info.backend == "mlx-lm"
    assert loaded.vision is None
    assert loaded.unseen == f"they need mlx-vlm {VLM_VERSION}: {INSTALL}"
    assert examine(ModelSpec(str(path))).unseen == loaded.unseen
    quantised = load(ModelSpec(str(path), images=False))
    assert "--kv-bits" in str(quantised.unseen)


def test_a_model_of_mlx_lm_does_not_import_mlx_vlm(folder: Path) -> None:
    """Which would take seconds and memory at each start."""
    code = (
        "import sys\n"
        "from mlxcache.model.load import ModelSpec, load\n"
        f"print(load(ModelSpec({str(folder)!r})).info.backend)\n"
        "print([name for name in sys.modules if name.startswith('mlx_vlm')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["mlx-lm", "[]"]
