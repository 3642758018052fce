"""What tests allow beside the bytes of arrays, and how they read a process's peak."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import psutil

from tests.memory import peak_bytes, rounding_bytes

ASK = "import os, mlx.core; print(os.environ.get('MLX_ENABLE_TF32'))"


def test_nothing_is_allowed_on_a_cpu_and_three_pages_an_array_on_a_gpu() -> None:
    assert rounding_bytes(1000, on_gpu=False) == 0
    page = rounding_bytes(1, on_gpu=True) // 3
    assert page >= max(16_384, resource.getpagesize())
    assert page % resource.getpagesize() == 0
    assert rounding_bytes(10, on_gpu=True) == 30 * page


def test_a_peak_is_in_bytes() -> None:
    held = psutil.Process().memory_info().rss
    assert held * 0.9 < peak_bytes() < held * 100


def test_hundreds_of_connections_can_be_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = 1000 if hard < 0 else min(1000, hard)
    assert soft < 0 or soft >= least


def test_float32_is_exact_here_and_in_processes_that_tests_start() -> None:
    assert os.environ["MLX_ENABLE_TF32"] == "0"
    done = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]
