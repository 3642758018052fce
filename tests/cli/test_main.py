"""The command line from outside: help, version, wrong usage."""

import os
import re
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mlxcache import __version__
from mlxcache.cli.main import COMMANDS, app, load
from mlxcache.config import SETTINGS

RUN = CliRunner()
WIDE = {"COLUMNS": "200", "NO_COLOR": "1"}


def test_the_package_is_the_command_too() -> None:
    """For an installation whose scripts are not on the PATH."""
    command = [sys.executable, "-m", "mlxcache", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"mlxcache {__version__}\n"


def test_version():
    """The command and the flag print name and number."""
    assert RUN.invoke(app, ["version"]).output == f"mlxcache {__version__}\n"
    assert RUN.invoke(app, ["--version"]).output == f"mlxcache {__version__}\n"


def test_a_misspelt_variable_is_reported_with_the_nearest_name():
    """On the standard error, without its value."""
    named = {"MLXCACHE_MODL": "secret", "MLXCACHE_URLS": "x", "MLXCACHE_QQQQQQ": "x"}
    result = RUN.invoke(app, ["version"], env={**WIDE, **named, "MLXCACHE_RAM": "8GB"})
    assert result.exit_code == 0
    assert result.stdout == f"mlxcache {__version__}\n"
    told = result.stderr.splitlines()
    assert told == [
        "Warning: MLXCACHE_MODL is ignored: no setting has that name; did you mean MLXCACHE_MODEL?",
        "Warning: MLXCACHE_QQQQQQ is ignored: no setting has that name",
        "Warning: MLXCACHE_URLS is ignored: no setting has that name; did you mean MLXCACHE_URL?",
    ]


def test_help_shows_every_flag():
    """Each setting has one."""
    shown = set(re.findall(r"--([a-z-]+)", RUN.invoke(app, ["serve", "--help"], env=WIDE).output))
    assert {one.flag[2:] for one in SETTINGS.values() if not one.only_key} <= shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--nope"],
        ["serve", "--port", "eighty"],
        ["serve", "--ram", "lots"],
        ["serve", "org/one", "org/two", "--draft-model", "org/three"],
        ["serve", "--ram", "500TB"],
        ["serve", "--kv-bits", "3"],
        ["serve", "--disk", "lots"],
        ["serve", "--host", "0.0.0.0"],
        ["serve", "--config", "no-such-file.toml"],
        ["nonsense"],
    ],
)
def test_wrong_usage_exits_with_2_and_an_error_message(arguments):
    """Before a model is loaded or a port opened."""
    result = RUN.invoke(app, arguments, env=WIDE)
    assert result.exit_code == 2
    assert "Error" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["claude", "-p", "hello"], "launch claude -- -p hello"),
        (["claude", "--continue"], "launch claude -- --continue"),
        (["--ram", "5GB", "claude", "-ra b", "c"], "launch --ram 5GB claude -- '-ra b' c"),
        (["claude", "--concurency", "4"], "Did you mean --concurrency? Arguments"),
        (
            ["claude", "-p", "hello", "--model", "a b", "-c", "--stop-after", "--ram=5GB"],
            "launch claude --model 'a b' --stop-after --ram=5GB -- -p hello -c",
        ),
        (["claude", "-p", "--json", "--", "--ram", "x"], "launch claude --json -- -p --ram x"),
    ],
)
def test_launch_says_where_arguments_for_the_client_go(arguments, words):
    """With the words that were typed, and without options that are named a little alike."""
    result = RUN.invoke(app, ["launch", *arguments], env=WIDE)
    assert result.exit_code == 2
    assert "Arguments for Claude Code go after `--`: " in result.output
    assert words in result.output
    assert "Possible options" not in result.output


def test_launch_without_a_client_before_an_unknown_option_has_no_such_advice():
    output = RUN.invoke(app, ["launch", "-p", "claude"], env=WIDE).output
    assert "No such option: -p" in output
    assert "go after" not in output


@pytest.mark.parametrize(
    ("arguments", "like"),
    [
        (["launch", "cluade"], "did you mean claude?"),
        (["snapshot", "x", "-o", "y", "--format", "mlx-lmm"], "did you mean mlx-lm?"),
        (["launch", "zzzz"], "'anyclaude'."),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest(arguments, like):
    """Without the words of the library that checks it."""
    output = RUN.invoke(app, arguments, env=WIDE).output
    assert "Value error" not in output
    assert f"'{arguments[-1]}' is not one of '" in output
    assert like in output


SLOWER = ("numpy", "httpx", "mlx", "mlx_lm", "transformers", "pydantic", "typer.rich_utils")
SLOW = (*SLOWER, "psutil", "asyncio", "rich")
"""Modules that take from 10 ms, or from 80 ms, to seconds to import."""


def run_and_list_slow(arguments, variables, slow=SLOW):
    code = (
        "import sys, atexit; sys.argv[0] = 'mlxcache'\n"
        f"atexit.register(lambda: print('slow:', [n for n in {slow} if n in sys.modules]))\n"
        "from mlxcache.cli.main import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "variables", "slow"),
    [
        (["--version"], {}, SLOW),
        (["--help"], {}, SLOW),
        (
            [],
            {"_MLXCACHE_COMPLETE": "complete_bash", "COMP_WORDS": "x se", "COMP_CWORD": "1"},
            [one for one in SLOW if one != "rich"],
        ),
        *(([name, "--help"], {}, SLOWER) for name in COMMANDS),
    ],
    ids=["version", "help", "tab", *COMMANDS],
)
def test_what_only_names_commands_imports_nothing_slow(arguments, variables, slow):
    """The version, every help, and a TAB that completes a command."""
    done = run_and_list_slow(arguments, variables, slow)
    assert done.returncode == 0
    assert done.stdout.endswith("slow: []\n")
    assert "serve" in done.stdout or "mlxcache" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--model", "./absent"], "There is no folder absent"),
        (["--cache-dir", f"{__file__}/below"], f"{__file__}/below cannot be written"),
        (["--cache-dir", f"{__file__}/below", "--model", "."], "unless you add --disk off: Not a"),
    ],
)
def test_a_path_that_cannot_be_served_is_told_in_one_sentence_before_anything_slow(arguments, told):
    done = run_and_list_slow(["serve", *arguments], WIDE)
    assert done.returncode
    assert done.stderr.count("\n") == 1
    assert told in done.stderr
    assert "mlx" not in done.stdout


def test_a_port_in_use_is_told_before_anything_slow():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run_and_list_slow(["serve", "--port", str(taken.getsockname()[1])], WIDE)
    assert done.returncode == 1
    assert "of 127.0.0.1 is in use by" in done.stderr
    assert "mlx" not in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_the_same_in_the_list_and_in_its_own_help(name):
    """The first line; the list has it without importing the command."""
    listed = COMMANDS[name].help
    assert (load(name).help or "").partition("\n")[0] == listed
