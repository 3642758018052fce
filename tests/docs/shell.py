"""A folder and a PATH for the blocks of a page: this checkout's commands, and clients' stand-ins.

A stand-in asks the server as the client would, with nothing but the variables that it was given.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, for_server

MLXCACHE = """\
if [ "${1-}" = serve ]; then {serve}; exit; fi
exec {python} "$@"
"""
"""Of `serve` only the settings are looked at, elsewhere: see `commands.check`."""
FORKING = Path(__file__).with_name("forking.py")
ASK_MESSAGES = """\
echo "working in $PWD"
curl -sSf "$ANTHROPIC_BASE_URL/v1/messages" -H "Authorization: Bearer $ANTHROPIC_AUTH_TOKEN" \\
  -H "Content-Type: application/json" -d "{\\"model\\": \\"$ANTHROPIC_MODEL\\", \\"max_tokens\\": 8,
  \\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"Hello.\\"}]}"
"""
ASK_CHAT = """\
ask() {
  curl -sSf "$1/models" -H "Authorization: Bearer $3"
  curl -sSf "$1/chat/completions" -H "Authorization: Bearer $3" \\
    -H "Content-Type: application/json" -d "{\\"model\\": \\"$2\\", \\"max_tokens\\": 8,
    \\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"Hello.\\"}]}"
}
[ "$ANYCLAUDE_MODE" = mlx-lm ]
ask "$MLX_LM_URL" "$MLX_LM_MODEL" "$MLX_LM_API_KEY"
ask "$LOCAL_URL" "$LOCAL_MODEL" "$LOCAL_API_KEY"
[ "$LOCAL_CONTEXT_LENGTH" -gt 0 ]
"""
WITH_CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
_VERSION = 'case "${1-}" in --version) echo 1.0.0; exit ;; esac\n'
PROGRAMS = {
    "python": f'exec "{sys.executable}" "$@"',
    "claude": _VERSION + ASK_MESSAGES,
    "anyclaude": ASK_CHAT,
    "open": 'curl -sSf "$1"',
}


@contextmanager
def command(folder: Path) -> Iterator[str]:
    """The words that run `mlxcache`: in a process that has its imports, where forks are safe."""
    if sys.platform != "linux":
        yield f'"{sys.executable}" -m mlxcache.cli.main'
        return
    path = folder / "socket"
    words = [sys.executable, str(FORKING), str(path)]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield f'"{sys.executable}" -S -E "{FORKING}" "{path}"'
        finally:
            process.kill()


def furnish(folder: Path, mlxcache: str, *, serves: bool = False) -> None:
    """Make in `folder` what a clone has and a page's commands want.

    `mlxcache`: the words that run it. `serves`: a server too, else its settings are enough.
    """
    serve = f'exec "{sys.executable}" -m mlxcache.cli.main "$@"' if serves else "echo would serve"
    script = MLXCACHE.replace("{python}", mlxcache).replace("{serve}", serve)
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "mlxcache").symlink_to(folder)  # the pages' place of a clone
    (folder / "YOUR-PROJECT").mkdir()
    (folder / "path").mkdir()
    (folder / "bin").mkdir()
    for name, code in PROGRAMS.items():
        _script(folder / "path" / name, code)
    for path in ("path", "bin"):
        _script(folder / path / "mlxcache", script)
    shutil.copy(ROOT / "bin" / "serve", folder / "bin" / "serve")


def _script(path: Path, code: str) -> None:
    path.write_text(f"#!/bin/sh\nset -eu\n{code}\n")
    path.chmod(0o755)


def environ(folder: Path) -> dict[str, str]:
    """The variables of a reader who has nothing but what `furnish` has made."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLXCACHE_", "XDG_"))}
    return kept | {
        "PATH": f"{folder / 'path'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
    }


def run(code: str, folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    """Run shell code as a reader would, whose server is at `url` and not where pages have it."""
    code = for_server(code, url).replace("curl -s ", "curl -sSf ")
    return subprocess.run(
        ["sh", "-e", "-c", code],
        cwd=folder,
        env=environ(folder) | {"MLXCACHE_URL": url},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
