"""Types are read from any thread, and nothing in the project reads them another way."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import mlxcache
from mlxcache import typed

TOGETHER = """
import sys, threading, msgspec
from mlxcache import typed

INNER = "class I{0}(msgspec.Struct):\\n    a: int = 0\\n    b: 'list[int]' = []\\n"
SOURCE = "".join(INNER.format(i) for i in range(20)) + "class Outer(msgspec.Struct):\\n"
SOURCE += "".join(f"    f{i}: I{i} | None = None\\n" for i in range(20))
READERS = {
    "decode": lambda shape: typed.decode(shape, '{"f19": {}}'),
    "convert": lambda shape: typed.convert(shape, {"f19": {}}),
}
read = READERS[sys.argv[1]]
sys.setswitchinterval(1e-6)
for _ in range(int(sys.argv[2])):
    names = {"msgspec": msgspec}
    exec(SOURCE, names)
    go, found = threading.Barrier(4), []

    def work(shape=names["Outer"]):
        go.wait()
        found.append(read(shape).f19.a)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == [0] * 4
"""


def together(reader: str, times: int) -> int:
    """The status of a process whose threads read a new type all at once, so many times."""
    command = [sys.executable, "-c", TOGETHER, reader, str(times)]
    return subprocess.run(command, check=False, capture_output=True, timeout=300).returncode


@pytest.mark.parametrize("reader", ["decode", "convert"])
def test_threads_read_the_first_of_a_type_at_once(reader: str) -> None:
    assert together(reader, 400) == 0


def test_types_are_read_in_one_place() -> None:
    """msgspec by itself is used for what needs no Struct."""
    root = Path(mlxcache.__file__).parent
    lines = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        for line in path.read_text("utf-8").splitlines()
        if re.search(r"msgspec\.(convert|json\.Decoder|json\.decode\(.*type=)", line)
    ]
    assert [line for line in lines if not line.startswith("typed.py")] == []
    assert len(lines) == 3  # it would find them


def test_what_does_not_fit_is_an_error() -> None:
    class Shape(msgspec.Struct):
        size: int

    assert typed.decode(Shape, b'{"size": 3}').size == typed.convert(Shape, {"size": 3}).size == 3
    for wrong in ('{"size": "3"}', "{}", "[]"):
        with pytest.raises(msgspec.ValidationError):
            typed.decode(Shape, wrong)
    with pytest.raises(msgspec.ValidationError):
        typed.convert(Shape, {"size": "3"})
    with pytest.raises(msgspec.DecodeError):
        typed.decode(Shape, "{")
