"""One small server for all that pages and examples ask."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ToyMaker
from tests.docs import shell
from tests.forked import served
from tests.served import Served


@pytest.fixture(scope="session")
def mlxcache() -> Iterator[str]:
    """The words of a shell that run `mlxcache`. A socket's path must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, shell.command(Path(folder)) as words:
        yield words


@pytest.fixture(scope="session")
def server(toy: ToyMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A small model whose turns end by themselves."""
    model = toy("llama", emits={"<|im_end|>": 30})
    with served("--model", str(model), home=tmp_path_factory.mktemp("home")) as running:
        yield running
