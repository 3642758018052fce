"""Load a model in a child process, so that a download or load can be ended at any time.

`python -m mlxcache.bench.prove.loading MODEL` prints a JSON object with `path` or `error`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from mlxcache.bench.process import run_to_end, tail
from mlxcache.errors import ModelError
from mlxcache.model.load import ModelSpec, load


def load_in_child(model: str, folder: Path) -> Path:
    """Load `model`, a folder or Hub id, in a child process and return its folder. Blocks.

    The process logs to a file in `folder`. Raises ModelError if the model cannot be loaded.
    """
    log = folder / "loading.log"
    command = [sys.executable, "-m", "mlxcache.bench.prove.loading", model]
    status, printed = run_to_end(command, log)
    if status or not printed:
        raise ModelError(f"{model} cannot be loaded: status {status}\n{tail(log, 3)}".rstrip())
    value = json.loads(printed[-1])
    if "error" in value:
        raise ModelError(value["error"])
    return Path(value["path"])


def main() -> None:
    """Load the model named on the command line, print the result as JSON, and exit."""
    try:
        value = {"path": str(load(ModelSpec(sys.argv[1])).path)}
    except ModelError as error:
        value = {"error": str(error)}
    print(json.dumps(value), flush=True)
    os._exit(0)  # MLX's destructors may abort while a thread of it ends


if __name__ == "__main__":
    main()
