"""Loading of a model from its folder: weights, adapter, draft model, tokenizer, description."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters, load_model, load_tokenizer

from mlxcache.config.models import model_id
from mlxcache.errors import ModelError
from mlxcache.model import demo
from mlxcache.model.backend import (
    INSTALL,
    VLM_VERSION,
    Backend,
    choose_backend,
    has_images,
    may_see,
    takes_images,
)
from mlxcache.model.folder import check_files, checked_config, context_length, native_length
from mlxcache.model.heads import WithHeads, heads_for, in_files, is_of_heads, own_heads
from mlxcache.model.hub import Progress, here, outline, resolve, why
from mlxcache.model.markers import is_harmony, thinks
from mlxcache.model.pair import check_tokenizers, make_pair
from mlxcache.model.sampling import DEFAULTS_FILE, is_object, sampling_defaults
from mlxcache.model.vision import Vision, load_vision
from mlxcache.types import ModelInfo

if TYPE_CHECKING:
    from mlxcache.model.weights import BaseUse

log = logging.getLogger("mlxcache.model")

# What reading other people's files through mlx-lm and transformers raises.
_FAILURES = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ImportError,
    RuntimeError,
    SyntaxError,
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model to load, with its options.

    `model`, `draft`: a folder or a Hub id each. `images`: let mlx-vlm, if it is installed, run a
    model that it can feed images to, although mlx-lm could run it. `id`: the name that clients see.
    `draft` may be heads for multi-token prediction; `heads`: use those in the model's own files.
    """

    model: str
    adapter: str | None = None
    trust_remote_code: bool = False
    context: int | None = None
    id: str | None = None
    is_demo: bool = False
    draft: str | None = None
    images: bool = True
    heads: bool = False


Divide = Callable[[nn.Module, Mapping[str, Any]], None]
"""Drops the parts of a model that other processes have. Takes the model and its configuration."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to run.

    `config`: config.json as read by the library that runs the model. `unseen`: why it takes no
    images although its folder has the weights of a vision tower. `draft`: the folder of the draft
    model or heads; `model` is then a `Pair` or `WithHeads`, and `info` describes both. With heads
    from the model's own files it is `WithHeads` too.
    """

    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    info: ModelInfo
    path: Path
    vision: Vision | None = None
    draft: Path | None = None
    unseen: str | None = None


def load(
    spec: ModelSpec,
    *,
    lazy: bool = False,
    use: BaseUse | None = None,
    divide: Divide | None = None,
) -> Loaded:
    """Load the model that `spec` names. Blocks, also for a download; MLX thread only.

    With `lazy`, each weight is read when it is first used. Arrays that other models have in memory
    are taken from `use`; if an error is raised, the caller must call `use.release()`. Raises
    ModelError, which names the file at fault or says what to do.
    """
    path = resolve(spec.model)
    config = own = checked_config(path)
    backend = backend_of(spec, path)
    check_files(path)
    context_length(native_length(config), spec.context)  # raises before the weights are read
    lazily = lazy or spec.draft is not None or spec.heads
    model, config = _load_weights(spec, path, lazy=lazily, use=use, divide=divide)
    tokenizer = _load_tokenizer(spec, path, _eos(config) or _eos(own))
    info = replace(_info(spec, path, model, tokenizer, config), backend=backend)
    unseen = None
    if backend == "mlx-lm":
        vision = load_vision(model, tokenizer, config, label=info.id)
        unseen = why_unseen(spec, config) if has_images(path) else None
    else:
        from mlxcache.model import vlm  # noqa: PLC0415 - may be absent

        vision = vlm.load_vision(model, tokenizer, config, path, label=info.id)
    loaded = Loaded(model, tokenizer, config, info, path, vision, unseen=unseen)
    if spec.draft is not None:
        loaded = _with_draft(loaded, spec, spec.draft, use)
    elif spec.heads:
        loaded = _with_heads(loaded, None)
    if lazily and not lazy:
        mx.eval(loaded.model.parameters())
    return loaded


def _with_heads(loaded: Loaded, folder: Path | None) -> Loaded:
    """Put the heads in `folder` on the model, or, if that is None, those in its own files."""
    model = loaded.model
    heads = own_heads(model, loaded.path) if folder is None else heads_for(model, folder)
    if heads is None:
        if loaded.info.backend == "mlx-vlm" and in_files(loaded.path):
            log.info("%s: mlx-vlm runs it, so its heads for drafts are not used", loaded.info.id)
        return loaded
    size = sum(array.nbytes for _, array in tree_flatten(heads.parameters()))
    info = replace(loaded.info, weights_bytes=loaded.info.weights_bytes + size)
    return replace(loaded, model=WithHeads(model, heads), info=info, draft=folder)


def _with_draft(loaded: Loaded, spec: ModelSpec, name: str, use: BaseUse | None) -> Loaded:
    with _of_the_draft():
        folder = resolve(name)
        if is_of_heads(checked_config(folder)):
            loaded = _with_heads(loaded, folder)
            return replace(loaded, info=replace(loaded.info, draft=model_id(name)))
        own = ModelSpec(
            name, trust_remote_code=spec.trust_remote_code, context=spec.context, images=False
        )
        draft = load(own, lazy=True, use=use)  # raises before any weights are read
    check_tokenizers(loaded.tokenizer, draft.tokenizer)
    info, length = loaded.info, draft.info.context_length
    if length < info.context_length:
        log.warning("context of %s limited to that of its draft model: %d tokens", info.id, length)
    info = replace(
        info,
        context_length=min(length, info.context_length),
        weights_bytes=info.weights_bytes + draft.info.weights_bytes,
        draft=draft.info.id,
    )
    return replace(loaded, model=make_pair(loaded.model, draft.model), info=info, draft=draft.path)


def base_folders(spec: ModelSpec) -> list[Path]:
    """Return the folders of the model and of its draft model, which must be on this machine."""
    return [resolve(model) for model in (spec.model, spec.draft) if model is not None]


def estimate_bytes(spec: ModelSpec) -> int:
    """Return the bytes of the weight files of the model, its draft model and its adapter."""
    files = [file for folder in base_folders(spec) for file in folder.glob("model*.safetensors")]
    if spec.adapter is not None:
        files += Path(spec.adapter).expanduser().glob("adapters.safetensors")
    return sum(file.stat().st_size for file in files)


def load_again(loaded: Loaded, spec: ModelSpec, use: BaseUse) -> nn.Module:
    """Return a new model like `loaded.model`, with weights that are read at their first use."""
    model, _ = _load_weights(spec, loaded.path, lazy=True, use=use)
    if isinstance(loaded.model, WithHeads):
        return _with_heads(replace(loaded, model=model), loaded.draft).model
    if loaded.draft is None:
        return model
    with _of_the_draft():
        own = ModelSpec(str(loaded.draft), trust_remote_code=spec.trust_remote_code, images=False)
        draft, _ = _load_weights(own, loaded.draft, lazy=True, use=use)
    return make_pair(model, draft)


def fetch(spec: ModelSpec, progress: Callable[[str, int, int], None]) -> None:
    """Download the models that `spec` names, unless they are on this machine. Blocks; any thread.

    `progress` is called with the model's name, the bytes on disk and the bytes needed. Raises
    ModelError, before the download if the model cannot be run.
    """
    _fetch(spec.model, partial(progress, spec.model))
    if spec.draft is not None:
        with _of_the_draft():
            _fetch(spec.draft, partial(progress, spec.draft))


def _fetch(model: str, progress: Progress) -> None:
    if here(model) is None:
        try:
            folder, _ = outline(model)
        except ModelError:
            pass  # `resolve` says why, if it fails too
        else:
            config = checked_config(folder)
            if not is_of_heads(config):
                choose_backend(config, model)
    resolve(model, progress=progress)


@contextmanager
def _of_the_draft() -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        raise ModelError(f"--draft-model: {error}") from error


def _load_weights(
    spec: ModelSpec,
    path: Path,
    *,
    lazy: bool,
    use: BaseUse | None,
    divide: Divide | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    try:
        model, config = _build(spec, path)
        if use is not None:
            use.share(path, model)
        if spec.adapter is not None:
            _add_adapter(model, path, Path(spec.adapter).expanduser())
        if divide is not None:
            divide(model, config)
        if not lazy:
            mx.eval(model.parameters())
    except (*_FAILURES, SystemExit) as error:  # mlx_lm.models.olmo would end the process
        raise ModelError(_why(path, error)) from error
    return model, config


def _build(spec: ModelSpec, path: Path) -> tuple[nn.Module, dict[str, Any]]:
    backend, images = _choose(spec, path)
    if backend == "mlx-lm":
        model, config = load_model(path, lazy=True, trust_remote_code=spec.trust_remote_code)
        return model, config
    if spec.adapter is not None:
        raise ModelError(f"{path} is run by mlx-vlm: adapters (--adapter) need a model of mlx-lm.")
    from mlxcache.model import vlm  # noqa: PLC0415 - may be absent

    log.info("%s is run by mlx-vlm %s", path, VLM_VERSION)
    return vlm.load_model(path, images=images)


def _choose(spec: ModelSpec, path: Path) -> tuple[Backend, bool]:
    images = spec.images and spec.adapter is None and has_images(path)
    config = checked_config(path)
    return choose_backend(config, str(path / "config.json"), images=images), images


def backend_of(spec: ModelSpec, path: Path) -> Backend:
    """Return the library that runs the model in folder `path`.

    If both could run it, mlx-vlm is chosen only for feeding images. Raises ModelError if neither
    can, or the folder has no valid config.json.
    """
    return _choose(spec, path)[0]


def abilities(spec: ModelSpec, path: Path) -> tuple[Backend, bool]:
    """Return the library that runs the model in folder `path`, and whether it takes images."""
    backend, images = _choose(spec, path)
    return backend, takes_images(checked_config(path), backend, images=images)


def why_unseen(spec: ModelSpec, config: Mapping[str, Any]) -> str | None:
    """Return why a model that mlx-lm runs takes no images by mlx-vlm, as a text for the user."""
    if not may_see(config):
        return None
    if spec.adapter is not None or not spec.images:
        return "mlx-vlm is not used with --adapter, with --kv-bits, or on several machines"
    return f"they need mlx-vlm {VLM_VERSION}: {INSTALL}"


def _add_adapter(model: nn.Module, path: Path, adapter: Path) -> None:
    for name in ("adapter_config.json", "adapters.safetensors"):
        if not (adapter / name).exists():
            raise ModelError(
                f"The adapter {adapter} has no {name}. --adapter takes a folder with "
                "adapter_config.json and adapters.safetensors."
            )
    try:
        load_adapters(model, str(adapter))
    except _FAILURES as error:
        raise ModelError(f"The adapter {adapter} does not fit {path}: {error}") from error
    model.eval()


def _why(path: Path, error: BaseException) -> str:
    text = str(error)
    if isinstance(error, AttributeError | UnicodeDecodeError) and not is_object(path):
        return f"{path / DEFAULTS_FILE} is not a JSON object: correct or remove it."
    if isinstance(error, SystemExit):
        return f"{path / 'config.json'}: mlx-lm lacks a package that this model type needs."
    if "trust_remote_code" in text:
        return (
            f"{path} brings its own Python code ({path / 'config.json'}, model_file). If you trust "
            "it, start with --trust-remote-code."
        )
    return f"The model in {path} cannot be loaded: {type(error).__name__}: {text}"


def _load_tokenizer(spec: ModelSpec, path: Path, ends: list[int] | None) -> TokenizerWrapper:
    extra = {"trust_remote_code": True} if spec.trust_remote_code else {}
    try:
        return load_tokenizer(path, extra, eos_token_ids=ends)
    except _FAILURES as error:
        raise ModelError(
            f"The tokenizer in {path} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _eos(config: Mapping[str, Any]) -> list[int] | None:
    found = config.get("eos_token_id")
    if found is None:
        found = (config.get("text_config") or {}).get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    return [i for i in ids if isinstance(i, int) and not isinstance(i, bool)] or None


def _info(
    spec: ModelSpec,
    path: Path,
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    config: Mapping[str, Any],
) -> ModelInfo:
    native = native_length(config, getattr(tokenizer, "model_max_length", None))
    length = context_length(native, spec.context)
    return ModelInfo(
        id=spec.id or model_id(spec.model),
        context_length=length,
        max_context_length=native or length,
        weights_bytes=sum(array.nbytes for _, array in tree_flatten(model.parameters())),
        architecture=str(config["model_type"]),
        has_thinking=thinks(tokenizer),
        has_tools=bool(tokenizer.has_tool_calling) or is_harmony(tokenizer),
        is_demo=spec.is_demo,
        created=int((path / "config.json").stat().st_mtime),
        sampling=sampling_defaults(path),
        takes_effort="reasoning_effort" in str(tokenizer.chat_template or ""),
    )


def tokenizer_of(model: str | None) -> TokenizerWrapper:
    """Load the tokenizer of a folder or Hub id, None for the demo's, without weights."""
    if model is None:
        with tempfile.TemporaryDirectory(prefix="mlxcache-") as folder:
            text = (demo.DATA / "tokenizer.json").read_text(encoding="utf-8")
            path = Path(folder)
            demo.write_tokenizer(path, text, context=demo.CONTEXT, thinking=False)
            return load_tokenizer(path)
    try:
        path = Path(model).expanduser()
        return load_tokenizer(path if path.is_dir() else model)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        raise ModelError(
            why(model, None, error)
            or f"the tokenizer of {model} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
