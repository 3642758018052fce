"""Loading of a model from its folder: weights, adapter, draft model, tokenizer, description."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

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
from mlxcache.model.base_weights import BaseUse
from mlxcache.model.context import context_length, native_length
from mlxcache.model.generation import FILE, is_object, sampling_defaults
from mlxcache.model.hub import Progress, fetch_config, here, resolve, why
from mlxcache.model.markers import is_harmony, thinks
from mlxcache.model.pair import check_tokenizers, make_pair
from mlxcache.model.vision import Vision, load_vision
from mlxcache.model.weight_files import tensor_index
from mlxcache.types import ModelInfo
from mlxcache.utf8 import NotUtf8, read_utf8

log = logging.getLogger("mlxcache.model")

__all__ = ["Loaded", "ModelSpec", "Progress", "fetch", "load", "resolve"]

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

    `model`: a folder or a Hub id. `revision`: the Hub's branch, tag or commit. `adapter`: a folder
    with adapter_config.json and adapters.safetensors. `draft`: folder or Hub id of a draft model.
    `images`: let mlx-vlm, if it is installed, run a model that it can feed images to, although
    mlx-lm could run it. `trust_remote_code`: allow Python code in the model's folder to
    run. `context`: context length in tokens, at most the model's own. `chat_template`: path of a
    file or the template itself, used instead of the model's. `id`: the name that clients see, by
    default one made from `model`. `is_demo`: the model is the built-in demo.
    """

    model: str
    adapter: str | None = None
    trust_remote_code: bool = False
    context: int | None = None
    revision: str | None = None
    chat_template: str | None = None
    id: str | None = None
    is_demo: bool = False
    draft: str | None = None
    images: bool = True


Divide = Callable[[nn.Module, Mapping[str, Any]], None]
"""Function that drops the parts of a model that other processes have.

It takes the model and its configuration, and changes the model in place.
"""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is ready to run.

    `tokenizer`: mlx-lm's TokenizerWrapper. `config`: config.json as read by the library that runs
    the model, mlx-lm or mlx-vlm. `path`: the model's folder. `vision`: the processor of its images,
    or None if the model takes no images. `unseen`: a text for the user, the reason why the model
    takes no images although its folder has the weights of a vision tower, else None. `draft`: the
    folder of the draft model, or None. With a draft model, `model` is a `Pair`, one module that
    runs both models, and `info` describes both.
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
    progress: Progress | None = None,
    *,
    lazy: bool = False,
    use: BaseUse | None = None,
    divide: Divide | None = None,
) -> Loaded:
    """Load the model that `spec` names. Blocks; MLX thread only.

    With `lazy`, each weight is read when it is first used, else all are read before the return.
    `use`: the arrays that this model uses in common with other loaded models; those in memory are
    not read again. If an error is raised, the caller must call `use.release()`. `divide(model,
    config)` may drop parts of the model before any weight is read. A model on the Hub is downloaded
    first, and `progress` is called with the bytes on disk and the bytes needed; to keep the MLX
    thread free, call `fetch` in another thread before. Raises ModelError, which names the file at
    fault or says what to do.
    """
    path = resolve(spec.model, spec.revision, progress)
    config = own = checked_config(path)
    backend = backend_of(spec, path)
    check_files(path)
    template = _template(spec.chat_template)
    context_length(native_length(config), spec.context)  # raises before the weights are read
    lazily = lazy or spec.draft is not None
    model, config = _load_weights(spec, path, lazy=lazily, use=use, divide=divide)
    tokenizer = _load_tokenizer(spec, path, _eos(config) or _eos(own), template)
    info = replace(_info(spec, path, model, tokenizer, config), backend=backend)
    vision = None
    if backend == "mlx-lm":
        vision = load_vision(model, tokenizer, config, label=info.id)
    else:
        vision = _vlm_vision(model, tokenizer, config, path, info.id)
    unseen = why_unseen(spec, config) if backend == "mlx-lm" and has_images(path) else None
    loaded = Loaded(model, tokenizer, config, info, path, vision, unseen=unseen)
    if spec.draft is None:
        return loaded
    loaded = _with_draft(loaded, spec, spec.draft, use)
    if not lazy:
        mx.eval(loaded.model.parameters())
    return loaded


def _with_draft(loaded: Loaded, spec: ModelSpec, name: str, use: BaseUse | None) -> Loaded:
    """Return a copy of `loaded` with the draft model `name` (a folder or Hub id) added.

    The context length becomes the shorter one of both models. Weights that other models have in
    memory are taken from `use`, if it is given. Raises ModelError if the draft model cannot be
    loaded, or cannot be used with the model.
    """
    with _of_the_draft():
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
    """Return the folder of the model and, if `spec` names a draft model, the folder of that.

    Both models must be on this machine. May be called on any thread. Raises ModelError if a folder
    cannot be found.
    """
    folders = [resolve(spec.model, spec.revision)]
    if spec.draft is not None:
        folders.append(resolve(spec.draft))
    return folders


def estimate_bytes(spec: ModelSpec) -> int:
    """Return the total size in bytes of the weight files of all models in `spec`.

    These are the model, its draft model and its adapter, which must be on this machine. May be
    called on any thread. Raises ModelError if a model's folder cannot be found.
    """
    files = [file for folder in base_folders(spec) for file in folder.glob("model*.safetensors")]
    if spec.adapter is not None:
        files += Path(spec.adapter).expanduser().glob("adapters.safetensors")
    return sum(file.stat().st_size for file in files)


def load_again(loaded: Loaded, spec: ModelSpec, use: BaseUse) -> nn.Module:
    """Return a new model like `loaded.model`, with weights that are read at their first use.

    `spec` must be the one from which `loaded` was made. Weights that other models have in memory
    are taken from `use`. Raises ModelError if the model cannot be built from its files any more.
    MLX thread only.
    """
    model, _ = _load_weights(spec, loaded.path, lazy=True, use=use)
    if loaded.draft is None:
        return model
    with _of_the_draft():
        own = ModelSpec(str(loaded.draft), trust_remote_code=spec.trust_remote_code, images=False)
        draft, _ = _load_weights(own, loaded.draft, lazy=True, use=use)
    return make_pair(model, draft)


def fetch(spec: ModelSpec, progress: Callable[[str, int, int], None]) -> None:
    """Download the models that `spec` names, unless they are on this machine. Blocks.

    May be called on any thread. `progress` is called with the model's name, the bytes on disk and
    the bytes needed. Raises ModelError if a model cannot be found or downloaded, and before the
    download if it cannot be run.
    """
    _fetch(spec.model, spec.revision, partial(progress, spec.model))
    if spec.draft is not None:
        with _of_the_draft():
            _fetch(spec.draft, None, partial(progress, spec.draft))


def _fetch(model: str, revision: str | None, progress: Progress) -> None:
    """Download a model unless all of its files are on this machine.

    `progress` is called with the bytes on disk and the bytes needed. Raises ModelError if the model
    cannot be found or downloaded, and before the download if no library can run it.
    """
    if here(model, revision) is None and (folder := fetch_config(model, revision)) is not None:
        choose_backend(checked_config(folder), model)
    resolve(model, revision, progress)


@contextmanager
def _of_the_draft() -> Iterator[None]:
    """Context manager that prefixes the text of a ModelError with "--draft-model: "."""
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
    """Build the model in folder `path`, with weights that are read at their first use.

    Returns the model and its configuration, as the library that runs it reads config.json. Raises
    ModelError as `backend_of`, and if `spec` has an adapter but mlx-vlm has to run the model; other
    errors of the library are not converted.
    """
    backend, images = _choose(spec, path)
    if backend == "mlx-lm":
        model, config = load_model(path, lazy=True, trust_remote_code=spec.trust_remote_code)
        return model, config
    if spec.adapter is not None:
        raise ModelError(f"{path} is run by mlx-vlm: adapters (--adapter) need a model of mlx-lm.")
    from mlxcache.model.vlm import load_model as load_vlm  # noqa: PLC0415 - may be absent

    log.info("%s is run by mlx-vlm %s", path, VLM_VERSION)
    return load_vlm(path, images=images)


def _choose(spec: ModelSpec, path: Path) -> tuple[Backend, bool]:
    """Return the library that runs the model in folder `path`, and whether images are allowed.

    Images are allowed if the folder has the weights of a vision tower and the settings of an image
    processor, `spec.images` is True, and `spec` has no adapter. Raises ModelError as `backend_of`.
    """
    images = spec.images and spec.adapter is None and has_images(path)
    config = checked_config(path)
    return choose_backend(config, str(path / "config.json"), images=images), images


def backend_of(spec: ModelSpec, path: Path) -> Backend:
    """Return the library that runs the model in folder `path`.

    If both libraries could run it, mlx-vlm is chosen only for feeding images, so not if
    `spec.images` is False or `spec` has an adapter. Raises ModelError if neither can run the model,
    or the folder has no valid config.json.
    """
    return _choose(spec, path)[0]


def abilities(spec: ModelSpec, path: Path) -> tuple[Backend, bool]:
    """Return the library that runs the model in folder `path`, and whether the model takes images.

    An adapter in `spec`, or `spec.images` False, excludes images that only mlx-vlm can feed. The
    weights are not loaded. Raises ModelError as `backend_of`.
    """
    backend, images = _choose(spec, path)
    return backend, takes_images(checked_config(path), backend, images=images)


def _vlm_vision(
    model: nn.Module, tokenizer: TokenizerWrapper, config: Mapping[str, Any], path: Path, label: str
) -> Vision | None:
    from mlxcache.model import vlm_vision  # noqa: PLC0415 - may be absent

    return vlm_vision.load_vision(model, tokenizer, config, path, label=label)


def why_unseen(spec: ModelSpec, config: Mapping[str, Any]) -> str | None:
    """Return a text for the user: why a model that mlx-lm runs takes no images by mlx-vlm.

    `config`: the content of the model's config.json. Returns None if mlx-vlm cannot feed images to
    models with this configuration at all.
    """
    if not may_see(config):
        return None
    if spec.adapter is not None or not spec.images:
        return "mlx-vlm is not used with --adapter, with --kv-bits, or on several machines"
    return f"they need mlx-vlm {VLM_VERSION}: {INSTALL}"


def _add_adapter(model: nn.Module, path: Path, adapter: Path) -> None:
    """Add the adapter (LoRA) in the folder `adapter` to layers of `model`, in place.

    `path`: the folder of `model`, for the error message. Raises ModelError if the adapter lacks a
    file, or does not fit the model.
    """
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
        return f"{path / FILE} is not a JSON object: correct or remove it."
    if isinstance(error, SystemExit):
        return f"{path / 'config.json'}: mlx-lm lacks a package that this model type needs."
    if "trust_remote_code" in text:
        return (
            f"{path} brings its own Python code ({path / 'config.json'}, model_file). If you trust "
            "it, start with --trust-remote-code."
        )
    return f"The model in {path} cannot be loaded: {type(error).__name__}: {text}"


def _load_tokenizer(
    spec: ModelSpec, path: Path, ends: list[int] | None, template: str | None
) -> TokenizerWrapper:
    extra: dict[str, Any] = {}
    if spec.trust_remote_code:
        extra["trust_remote_code"] = True
    if template is not None:
        extra["chat_template"] = template
    try:
        return load_tokenizer(path, extra, eos_token_ids=ends)
    except _FAILURES as error:
        raise ModelError(
            f"The tokenizer in {path} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def _eos(config: Mapping[str, Any]) -> list[int] | None:
    """Return the ids of tokens that end a turn, as a model's configuration states them.

    `config`: the content of config.json, possibly merged with that of generation_config.json. The
    ids are those in its `eos_token_id` or, if that is missing, in that of its `text_config`.
    Returns None if there are none.
    """
    found = config.get("eos_token_id")
    if found is None:
        found = (config.get("text_config") or {}).get("eos_token_id")
    ids = found if isinstance(found, list) else [found]
    return [i for i in ids if isinstance(i, int) and not isinstance(i, bool)] or None


def _template(chat_template: str | None) -> str | None:
    if chat_template is None or "{" in chat_template or "\n" in chat_template:
        return chat_template
    file = Path(chat_template).expanduser()
    try:
        return read_utf8(file)
    except NotUtf8 as error:
        raise ModelError(f"The chat template {file} {error}.") from error
    except OSError as error:
        raise ModelError(f"The chat template {file} cannot be read: {error}") from error


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


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "*.tiktoken",
    "tiktoken.model",
    "tokenizer_config.json",
)


def checked_config(path: Path) -> dict[str, Any]:
    """Return the content of the config.json in the folder `path`.

    Raises ModelError if the file is missing, is no JSON object, or has no `model_type`.
    """
    file = path / "config.json"
    if not file.exists():
        raise ModelError(f"{path} has no config.json, so it is not a model's folder.")
    config = _read_json(file)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{file} has no model_type: expected the config.json of a model.")
    return config


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(read_utf8(file))
    except NotUtf8 as error:
        raise ModelError(f"{file} {error}.") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object.")
    return value


def check_files(path: Path) -> None:
    """Raise ModelError unless the folder of a model has all weight files and a tokenizer.

    The weight files are those that model.safetensors.index.json names, if there is one.
    """
    if not any(path.glob("model*.safetensors")):
        raise ModelError(
            f"{path} has no weights (model*.safetensors). Other formats have to be converted "
            "first: `mlx_lm.convert --hf-path MODEL --mlx-path FOLDER`."
        )
    try:
        files = set(tensor_index(path).values())
    except (OSError, ValueError) as error:
        raise ModelError(f"the list of weight files cannot be read: {error}") from error
    missing = sorted(name for name in files if not (path / name).exists())
    if missing:
        raise ModelError(
            f"{path} lacks {len(missing)} of its weight files, {missing[0]} first: "
            "the download or copy is incomplete."
        )
    if not any(any(path.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise ModelError(f"{path} has no tokenizer (tokenizer.json or tokenizer.model).")


def tokenizer_of(model: str | None) -> TokenizerWrapper:
    """Load the tokenizer and chat template of a folder or Hub id, without weights.

    None stands for the built-in demo model. For an id that is not in the Hub's cache, only small
    files are downloaded. Raises ModelError if the tokenizer cannot be loaded.
    """
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
