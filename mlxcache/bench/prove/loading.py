"""Loads a model in a child process, so that a download or load can be ended at any time.

`python -m mlxcache.bench.prove.loading MODEL` prints one JSON object: `{"path"}`, or `{"error"}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from mlxcache.bench.process import tail
from mlxcache.errors import ModelError
from mlxcache.model.load import ModelSpec, load


def load_in_child(model: str, folder: Path) -> Path:
    """Resolve and load `model` (a folder or Hub id) once; its folder. Blocks; logs in `folder`.

    Raises ModelError as the server does.
    """
    log = folder / "loading.log"
    command = [sys.executable, "-m", "mlxcache.bench.prove.loading", model]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
            start_new_session=True,
        )  # fmt: skip
    try:
        printed, _ = process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode or not printed.strip():
        last = tail(log, 3)
        raise ModelError(f"{model} cannot be loaded: status {process.returncode}\n{last}".rstrip())
    value = json.loads(printed.strip().splitlines()[-1])
    if "error" in value:
        raise ModelError(value["error"])
    return Path(value["path"])


def main() -> None:
    """Load the model that the command line names."""
    try:
        value = {"path": str(load(ModelSpec(sys.argv[1])).path)}
    except ModelError as error:
        value = {"error": str(error)}
    print(json.dumps(value), flush=True)
    os._exit(0)  # MLX's destructors may abort while a thread of it ends


if __name__ == "__main__":
    main()
