"""`mlxcache launch` with the real clients that are installed, and no server running.

`npm install -g @anthropic-ai/claude-code opencode-ai @openai/codex@0.94.0` installs them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ToyMaker

ARGUMENTS = {
    "claude": ("-p", "hello"),
    "opencode": ("run", "hello"),
    "codex": ("exec", "--skip-git-repo-check", "hello"),
}
SECONDS = 1500


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ARGUMENTS))
def test_a_real_client_completes_a_prompt(name: str, toy: ToyMaker, tmp_path: Path) -> None:
    """The client prints the model's reply, in a home folder of its own."""
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed")
    if name == "codex" and not _speaks_chat(tmp_path):
        pytest.skip("this version of codex uses only /v1/responses")
    # a long context and few weights, for prompts of 100 KB, and a model that ends its turns
    model = toy(
        "llama", vocab_size=8192, hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16,
        context=131072, emits={"<|im_end|>": 30},
    )  # fmt: skip
    home = tmp_path / "home"
    home.mkdir()
    flags = ["--model", str(model), "--ram", "500MB", "--port", "0", "--stop-after"]
    command = [sys.executable, "-m", "mlxcache.cli.main", "launch", name, *flags]
    done = subprocess.run(
        [*command, "--api-key", "a key", "--", *ARGUMENTS[name]],
        cwd=home,
        env=_environment(tmp_path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "keeps running" not in done.stderr
    log = next((tmp_path / "cache" / "log").iterdir()).read_text()
    prompts = re.findall(r"prompt (\d+) .*  stop", log)
    assert max(map(int, prompts)) > 2000, log


def _environment(folder: Path) -> dict[str, str]:
    agents = ("ANTHROPIC_", "CLAUDE", "CODEX", "MLXCACHE_", "OPENCODE", "XDG_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(agents)}
    cache = {"MLXCACHE_CACHE_DIR": str(folder / "cache"), "MLXCACHE_DISK": "off"}
    return kept | cache | {"HOME": str(folder / "home")}


def _speaks_chat(folder: Path) -> bool:
    from mlxcache.cli.launch.clients import CLIENTS, ClientName, check_program
    from mlxcache.cli.launch.setup import Invocation
    from mlxcache.errors import MlxcacheError

    invocation = Invocation(Path("codex"), (), _environment(folder), folder, folder)
    try:
        check_program(CLIENTS[ClientName.CODEX], invocation)
    except MlxcacheError:
        return False
    return True
