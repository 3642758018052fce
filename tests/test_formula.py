"""The Homebrew formula of a wheel: `bin/_formula.py`, with a stand-in for uv and with uv itself."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from zipfile import ZipFile

import pytest

SCRIPT = Path(__file__).parents[1] / "bin" / "_formula.py"
URL = "https://example.org/v1.2.0/mlxcache-1.2.0-py3-none-any.whl"
METADATA = """Metadata-Version: 2.4
Name: {name}
Version: {version}
Summary: A server of things: words that are too many.
"""
INDEX = {
    "mlx": [f"mlx-0.32.4-cp313-cp313-macosx_{one}_0_arm64.whl" for one in (14, 15, 26)],
    "numpy": [
        "numpy-2.4.6-cp312-cp312-macosx_14_0_arm64.whl",
        "numpy-2.4.6-cp313-cp313-macosx_11_0_arm64.whl",
        "numpy-2.4.6-cp313-cp313-macosx_14_0_arm64.whl",
        "numpy-2.4.6-cp313-cp313-manylinux_2_28_x86_64.whl",
    ],
    "rich": ["rich-15.0.0-py3-none-any.whl", "rich-15.1.0-py3-none-any.whl"],
}
"""What the index has."""

UV = """#!{python}
import os, pathlib, sys
assert sys.argv[1:3] == ["pip", "compile"], sys.argv
if "{broken}":
    sys.exit("no solution: {broken}")
lines = ['lock-version = "1.0"']
for name, files in {index!r}.items():
    lines += ["[[packages]]", f'name = "{{name}}"', "wheels = ["]
    for file in files:
        hashes = f'{{{{ sha256 = "{{file[:9]}}" }}}}'
        lines.append(f'{{{{ url = "https://files.example/{{file}}", hashes = {{hashes}} }}}},')
    lines += ["]"]
target = pathlib.Path(sys.argv[sys.argv.index("--output-file") + 1])
target.write_text("\\n".join(lines))
"""


def make_wheel(path: Path, requires: tuple[str, ...] = ()) -> Path:
    """A wheel with nothing but its metadata."""
    name, version = path.name.split("-")[:2]
    text = METADATA.format(name=name, version=version)
    text += "".join(f"Requires-Dist: {one}\n" for one in requires)
    folder = f"{name}-{version}.dist-info"
    with ZipFile(path, "w") as file:
        file.writestr(f"{folder}/METADATA", text)
        file.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        file.writestr(f"{folder}/RECORD", "")
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    requires = ("mlx>=0.32; sys_platform == 'darwin'", "numpy>=2", "rich>=14")
    unused = "other>=1; sys_platform == 'linux'"
    return make_wheel(tmp_path / "mlxcache-1.2.0-py3-none-any.whl", (*requires, unused))


def run(wheel: Path, path: str, **environ: str) -> subprocess.CompletedProcess[str]:
    constraints = wheel.with_name("constraints.txt")
    constraints.write_text("mlx==0.32.4\nnumpy==2.4.6\nrich==15.0.0\nother==1.0\n")
    command = [sys.executable, str(SCRIPT), str(wheel), "--url", URL]
    command += ["--homepage", "https://example.org", "--constraint", str(constraints)]
    environ = os.environ | environ | {"PATH": path}
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def stand_in(folder: Path, index: dict[str, list[str]], broken: str = "") -> str:
    """A folder with a program `uv` that locks the wheels of `index`, or fails."""
    (folder / "path").mkdir()
    uv = folder / "path" / "uv"
    uv.write_text(UV.format(python=sys.executable, index=index, broken=broken))
    uv.chmod(0o755)
    return str(uv.parent)


def blocks(formula: str) -> dict[str, list[tuple[str, str, str]]]:
    """By the system's word, empty for all: name, file and SHA-256 of the resources in its block."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    system = ""
    resource = r'resource "(.+)" do\n +url ".+/(.+)", using: :nounzip\n +sha256 "(.+)"'
    for match in re.finditer(rf"^  (?:(on_\w+.*) do$|(end)$|  )|{resource}", formula, re.MULTILINE):
        if match[1] or match[2]:
            system = match[1] or ""
        elif match[3]:
            found.setdefault(system, []).append((match[3], match[4], match[5]))
    return found


def test_each_macos_gets_its_own_wheels_and_shares_the_others(tmp_path: Path, wheel: Path) -> None:
    """The newest wheel that a system can run, for the formula's Python."""
    index = INDEX | {"rich": INDEX["rich"][:1]}
    done = run(wheel, stand_in(tmp_path, index))
    assert (done.returncode, done.stderr) == (0, "")
    found = blocks(done.stdout)
    words = {"on_sonoma": 14, "on_sequoia": 15, "on_tahoe :or_newer": 26}
    for word, system in words.items():
        file = f"mlx-0.32.4-cp313-cp313-macosx_{system}_0_arm64.whl"
        assert found.pop(word) == [("mlx", file, "mlx-0.32.")]
    numpy = ("numpy", "numpy-2.4.6-cp313-cp313-macosx_14_0_arm64.whl", "numpy-2.4")
    assert found == {"": [numpy, ("rich", "rich-15.0.0-py3-none-any.whl", "rich-15.0")]}
    assert f'  url "{URL}", using: :nounzip\n  version "1.2.0"' in done.stdout
    assert f'  sha256 "{hashlib.sha256(wheel.read_bytes()).hexdigest()}"' in done.stdout
    assert '  desc "Server of things"\n' in done.stdout
    assert done.stdout.count(" do\n") + 3 == len(re.findall(r"^ *end$", done.stdout, re.MULTILINE))


def test_a_formula_that_could_not_be_installed_is_not_written(tmp_path: Path, wheel: Path) -> None:
    """No wheel for a system, no solution, no uv, no wheel of this project."""
    done = run(wheel, stand_in(tmp_path, {"mlx": INDEX["mlx"][1:]}))
    assert (done.returncode, done.stdout) == (1, "")
    assert "mlx has no wheel with a SHA-256 for macOS 14" in done.stderr
    shutil.rmtree(tmp_path / "path")
    done = run(wheel, stand_in(tmp_path, {}, broken="rich is too old"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "for macOS 14:\nno solution: rich is too old" in done.stderr
    done = run(wheel, str(tmp_path))
    assert "uv is missing: install it" in done.stderr
    wheel.write_bytes(b"no archive")
    done = run(wheel, str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not a wheel of mlxcache" in done.stderr


@pytest.fixture
def index(tmp_path: Path) -> Iterator[str]:
    """The address of a package index that has `INDEX`, in the form of PEP 503."""
    root = tmp_path / "index"
    for name, files in INDEX.items():
        (root / name).mkdir(parents=True)
        links = []
        for file in files:
            data = make_wheel(root / name / file).read_bytes()
            links.append(f'<a href="{file}#sha256={hashlib.sha256(data).hexdigest()}">{file}</a>')
        (root / name / "index.html").write_text("\n".join(links))
    handler = partial(SimpleHTTPRequestHandler, directory=str(root))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("uv") is None, reason="uv is not installed")
def test_uv_finds_the_wheels_of_the_constraints_in_an_index(
    tmp_path: Path, wheel: Path, index: str
) -> None:
    """On any machine those of a Mac, with the SHA-256 of their bytes."""
    environ = {"UV_DEFAULT_INDEX": index, "UV_CACHE_DIR": str(tmp_path / "cache")}
    done = run(wheel, os.environ["PATH"], **environ)
    assert (done.returncode, done.stderr) == (0, "")
    found = blocks(done.stdout)
    assert [name for name, _, _ in found[""]] == ["numpy", "rich"]
    assert found[""][1][1] == "rich-15.0.0-py3-none-any.whl"
    assert [found[word][0][1][-21:] for word in found if word] == [
        f"_macosx_{system}_0_arm64.whl"[-21:] for system in (14, 15, 26)
    ]
    for resources in found.values():
        for name, file, sha256 in resources:
            data = (tmp_path / "index" / name / file).read_bytes()
            assert sha256 == hashlib.sha256(data).hexdigest()
