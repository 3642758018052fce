"""Remotes in a folder, and in an S3 server (moto) with a proxy with faults in front of it."""

from __future__ import annotations

import http.client
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlxcache.remote.objects import Objects, open_remote
from tests.remote.fault_proxy import FaultProxy

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3() -> Iterator[tuple[str, int]]:
    from moto.server import ThreadedMotoServer

    log = logging.getLogger("werkzeug")
    level = log.level
    log.setLevel(logging.ERROR)  # it logs every request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()
    log.setLevel(level)


@pytest.fixture
def use_endpoint(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def use(url: str) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return use


@pytest.fixture
def bucket(s3: tuple[str, int], use_endpoint: Callable[[str], None]) -> str:
    host, port = s3
    name = f"bucket-{next(_numbers)}"
    connection = http.client.HTTPConnection(host, port)
    connection.request("PUT", f"/{name}")
    assert connection.getresponse().status == 200
    connection.close()
    use_endpoint(f"http://{host}:{port}")
    return f"s3://{name}/team"


@pytest.fixture
def proxy(
    s3: tuple[str, int], bucket: str, use_endpoint: Callable[[str], None]
) -> Iterator[FaultProxy]:
    made = FaultProxy(*s3)
    use_endpoint(made.url)
    yield made
    made.close()


@pytest.fixture
def share(tmp_path: Path) -> Path:
    folder = tmp_path / "share"
    folder.mkdir()
    return folder


@pytest.fixture
def remote(share: Path) -> Iterator[Objects]:
    objects = open_remote(f"file://{share}")
    yield objects
    objects.close()
