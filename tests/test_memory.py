"""What tests allow beside the bytes of arrays, and how they read a process's peak."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

ASK = "import os, mlx.core; print(os.environ.get('MLX_ENABLE_TF32'))"


def test_hundreds_of_connections_can_be_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = 1000 if hard < 0 else min(1000, hard)
    assert soft < 0 or soft >= least


def test_float32_is_exact_here_and_in_processes_that_tests_start() -> None:
    assert os.environ["MLX_ENABLE_TF32"] == "0"
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]
