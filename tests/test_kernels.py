"""Kernels that MLX compiles lie where nobody else can put code, and damaged ones are replaced."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest

from mlxcache.kernels import open_kernel_folder

pytestmark = pytest.mark.skipif(sys.platform == "darwin", reason="Metal's kernels are no files")

COMPUTING = """
import tempfile
import mlx.core as mx
from mlxcache.mlx_thread import MlxThread

thread = MlxThread()
thread.start()
print(thread.call(lambda: mx.compile(lambda x: mx.exp(x) * 2)(mx.zeros(3)).tolist()).result())
print(tempfile.gettempdir())
"""


def computed(cache: Path, temporary: Path) -> list[str]:
    """Run a program that compiles one kernel on an MLX thread; return the lines that it prints."""
    environ = os.environ | {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", COMPUTING]
    return subprocess.check_output(command, env=environ, text=True, timeout=60).splitlines()


def make_old(library: Path, content: bytes) -> None:
    library.write_bytes(content)
    os.utime(library, (1e9, 1e9))


def test_no_kernel_comes_from_a_folder_of_others(tmp_path: Path) -> None:
    """What lies at its name in the shared folder is not loaded; an empty own one is no end."""
    temporary = tmp_path / "shared"
    temporary.mkdir()
    temporary.chmod(0o1777)
    expected = ["[2.0, 2.0, 2.0]", str(temporary)]
    assert computed(tmp_path, temporary) == expected
    folder = tmp_path / "mlxcache" / "kernels"
    assert folder.stat().st_mode & 0o777 == 0o700
    (kernel,) = folder.rglob("*.so")
    planted = temporary / kernel.relative_to(folder)
    planted.parent.mkdir(parents=True)
    planted.touch()
    make_old(kernel, b"")
    assert computed(tmp_path, temporary) == expected
    assert kernel.stat().st_size > 0


def test_a_private_folder_for_temporary_files_is_used(tmp_path: Path) -> None:
    """A user, or the system, made it so."""
    assert computed(tmp_path / "none", tmp_path)[1] == str(tmp_path)
    assert len(list(tmp_path.rglob("*.so"))) == 1
    assert not (tmp_path / "none").exists()


def test_incomplete_libraries_are_removed(tmp_path: Path) -> None:
    """Unless they are so new that another process may be writing them."""
    libraries = tmp_path / "mlx" / "1.0" / "cpu"
    libraries.mkdir(parents=True)
    whole = Path(msgspec._core.__file__).read_bytes()
    contents = {"whole": whole, "cut": whole[:-1], "short": whole[:40], "text": b"text" * 99}
    for name, content in contents.items():
        make_old(libraries / f"lib{name}.so", content)
    (libraries / "libnew.so").touch()
    assert open_kernel_folder(tmp_path) == tmp_path
    assert {one.name for one in libraries.iterdir()} == {"libwhole.so", "libnew.so"}


@pytest.mark.parametrize("fault", ["link", "file", "mode", "above", "owner"])
def test_a_folder_of_others_is_not_used(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new private one is used instead, with a warning that says why."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "above" / "kernels"
    folder.mkdir(parents=True)
    if fault in {"link", "file"}:
        folder.rmdir()
        folder.symlink_to(tmp_path) if fault == "link" else folder.touch()
    elif fault == "owner":
        monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    else:
        (folder if fault == "mode" else folder.parent).chmod(0o777)
    used = open_kernel_folder(folder)
    assert used.parent == tmp_path
    assert used.stat().st_mode & 0o777 == 0o700
    assert str(folder) in caplog.text
