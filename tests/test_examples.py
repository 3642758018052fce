"""The programs in examples/ run, and show that later turns are warm."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.served import served

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def server(toy, tmp_path_factory):
    """A small model whose turns end by themselves."""
    model = toy("llama", emits={"<|im_end|>": 30})
    with served("--model", str(model), home=tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.mark.parametrize("name", ["openai_chat.py", "anthropic_chat.py"])
def test_a_conversation_is_warm_from_its_second_turn(name, server):
    """By the numbers that the example prints: all of the last prompt but the new message."""
    command = [sys.executable, str(EXAMPLES / name), "--base-url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    turns = re.findall(r"turn \d: (\d+) of (\d+) prompt tokens cached", done.stdout)
    assert len(turns) == 3
    prompts = [int(prompt) for _, prompt in turns]
    for i in (1, 2):
        assert int(turns[i][0]) >= prompts[i - 1] - 1


def test_every_example_is_run():
    """A new one needs a test here."""
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"openai_chat.py", "anthropic_chat.py"}
