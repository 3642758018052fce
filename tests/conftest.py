"""Tiny models, made once per session, for every test that needs one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from hypothesis import settings

# How long an example takes depends on the machine and its other jobs; a hang ends by the timeout.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Nothing that is tested writes to the user's own cache folder, nor reads what is there."""
    folder = tmp_path_factory.mktemp("cache")
    # private and of all processes of this run, so that each of MLX's kernels is compiled once
    temporary = tmp_path_factory.getbasetemp().parent / "temporary"
    temporary.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setenv("MLXCACHE_CACHE_DIR", str(folder))  # for servers that tests start
        patch.setattr(platformdirs, "user_cache_path", lambda *_, **__: folder)
        patch.setattr(platformdirs, "user_data_path", lambda *_, **__: folder)  # on a Mac
        yield folder


pytest_plugins = ("tests.scheduled", "tests.fake_hub")

ToyMaker = Callable[..., Path]

FIRST_FAMILIES = ("llama", "qwen3_5", "gemma3")
"""Plain attention, recurrent layers, sliding windows."""

QUICK = FIRST_FAMILIES[:2]
"""Where a test takes both of these, the third is slow, too."""

SLOW_TIMEOUT_S = 1800
"""Time limit of a test that is marked `slow`, unless it is marked with a limit of its own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs on a first family too is slow on the others; the matrix alone takes all of them.

    The soak begins first: it takes a minute or two, and mostly waits.
    """
    from tests.toys.configs import FAMILIES

    items.sort(key=lambda item: not item.name.startswith("test_minutes_under"))
    functions = [item for item in items if isinstance(item, pytest.Function)]
    quick: dict[object, set[str]] = {}
    others: list[tuple[pytest.Function, set[str]]] = []
    for item in functions:
        called = item.callspec.params.values() if hasattr(item, "callspec") else ()
        families = {value for value in called if isinstance(value, str) and value in FAMILIES}
        quick.setdefault(item.function, set()).update(families & set(FIRST_FAMILIES))
        if families and not families & set(QUICK) and item.path.stem != "test_matrix":
            others.append((item, families))
    for item, families in others:
        first = quick[item.function]
        if first >= set(QUICK) or (first and not families & first):
            item.add_marker(pytest.mark.slow)
    for item in functions:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_TIMEOUT_S))


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> ToyMaker:
    """`toy(family, **options)` is the directory of such a toy, made at its first use."""
    made: dict[str, Path] = {}

    def make(family: str = "llama", **options: Any) -> Path:
        key = f"{family} {sorted(options.items())}"
        if key not in made:
            from tests.toys.toy import make_toy

            made[key] = make_toy(tmp_path_factory.mktemp(family) / "toy", family, **options)
        return made[key]

    return make


@pytest.fixture(scope="session")
def toy_llama(toy: ToyMaker) -> Path:
    """Dense attention: every layer's cache can be cut at any token."""
    return toy("llama")


@pytest.fixture(scope="session")
def toy_gemma3(toy: ToyMaker) -> Path:
    """Sliding windows of 64 tokens and full attention in turn."""
    return toy("gemma3")


@pytest.fixture(scope="session")
def toy_qwen3_5(toy: ToyMaker) -> Path:
    """Recurrent layers and full attention in turn."""
    return toy("qwen3_5")


@pytest.fixture(scope="session")
def toy_muse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Muse Spark, which takes images: sliding windows of 64 tokens and full attention in turn."""
    from tests.muse.toy import make_muse

    return make_muse(tmp_path_factory.mktemp("muse") / "muse")
