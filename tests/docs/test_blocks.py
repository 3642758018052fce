"""Every block of code in README and docs/ is run, sent, parsed, or held to what it shows.

What a block is stands in a comment right above it, where its language does not say it. A page's
blocks are run in their order, in one folder, as a reader would.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from mlxcache.config import SETTINGS, load_settings, unknown_variables
from tests.docs import commands, shell
from tests.docs.blocks import BLOCKS, ROOT, Block, for_server, of

NOT_RUN = {
    "it takes minutes": "its flags are parsed; tests/bench and tests/proofs run them small",
    "it takes a long time": "its flags are parsed; tests/bench and tests/proofs run them small",
    "it installs other servers": "its flags are parsed",
    "it installs mlxcache": "its flags are parsed; tests/test_wheel.py installs a wheel",
    "the suite would run itself": "its scripts are there",
    "it starts a client": "its flags are parsed; test_newcomer and tests/cli launch stand-ins",
    "it needs a shell that goes on": "its flags are parsed",
    "it installs a service": "its files are there; tests/cli reads them",
    "it changes a service": "its shell code is parsed",
    "it depends on the machine": "its flags are parsed; tests/cli runs the command",
    "it needs several machines": "its shell code is parsed; tests/server runs the routers",
    "it needs a bucket": "its shell code is parsed; tests/remote use an S3 server",
    "it needs the model's weights": "its flags are parsed",
}
"""Why a block is not run, in the words that pages use, and what of it is checked instead."""

ELSEWHERE = {"run by test_newcomer", "run by test_examples"}
LIVE = [block for block in of("sh", "python") if block.note not in ELSEWHERE]
TEXT = {
    "a drawing",
    "the layers",
    "a formula",
    "lines of the log",
    "an answer of the command",
    "a file of keys",
    "the start of a server with little memory",
}
LOG = re.compile(
    r"\d\d:\d\d:\d\d (-|ses_[0-9a-f]{12}|client \S+)"
    r"  prompt \d+  cached \d+( \(\d+ from disk\))?  fed \d+"
    r"  first token (-|[\d.]+ s)  (-|[\d.]+) tok/s  generated \d+( \(\d+ of \d+ drafts accepted\))?"
    r"  \w+(  first_seen|  lost \d+ \(\w+: \w+, about [\d.]+ s\))?"
)


CODEX = {"model", "model_provider", "model_context_window"}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_of_a_kind_that_is_checked(block: Block) -> None:
    """So that no code hides from the tests as plain text."""
    match block.language:
        case "sh" | "python":
            assert block.reason in NOT_RUN or block.note in {"", *ELSEWHERE}
        case "toml" if block.note == "settings of codex":
            assert tomllib.loads(block.code).keys() == {*CODEX, "model_providers"}
        case "toml":
            assert set(tomllib.loads(block.code)) <= set(SETTINGS)
        case "json" | "yaml":
            assert block.note.startswith(("body of ", "answer of ", "settings of "))
        case "text":
            assert block.note in TEXT
        case _:
            pytest.fail(f"{block} is in {block.language!r}")


@pytest.mark.parametrize("block", of("sh"), ids=str)
def test_shell_blocks_parse_and_name_what_there_is(block: Block, tmp_path: Path, monkeypatch):
    """Scripts, examples, flags and arguments of every command, and variables; also if not run."""
    subprocess.run(["sh", "-n"], input=block.code, text=True, check=True)
    for name in re.findall(r"(?:^|[\s`])((?:bin|examples)/[\w./-]+\w)", block.code):
        assert (ROOT / name).exists(), name
    monkeypatch.chdir(tmp_path)
    for arguments, variables in commands.ours(block.code):
        commands.touch_files(arguments, tmp_path)
        commands.check(arguments, variables)
    assert not list(unknown_variables(dict.fromkeys(commands.variables(block.code), ""), SPOKEN))


SPOKEN = ("MLXCACHE_URL",)


def test_a_documented_file_of_settings_is_accepted(tmp_path: Path) -> None:
    """As it stands in the page."""
    files = [block for block in of("toml") if not block.note]
    assert files
    for block in files:
        path = tmp_path / "config.toml"
        path.write_text(block.code)
        load_settings({}, {}, path)


@shell.WITH_CURL
@pytest.mark.parametrize("page", sorted({block.page for block in LIVE if not block.reason}))
def test_the_blocks_of_a_page_run_in_their_order(
    page, server, mlxcache, tmp_path: Path, capfd
) -> None:
    """As they stand, but for the port; of `serve` only the settings are read, above."""
    shell.furnish(tmp_path, mlxcache)
    for block in LIVE:
        if block.page != page or block.reason:
            continue
        if block.language == "python":
            code = for_server(block.code, server.url)
            exec(compile(code, str(block), "exec", dont_inherit=True), {"__name__": "__main__"})
            printed = capfd.readouterr().out
        else:
            done = shell.run(block.code, tmp_path, server.url)
            assert done.returncode == 0, f"{block}: {done.stdout}{done.stderr}"
            printed = done.stdout
        assert printed.strip(), f"{block} says nothing"


@pytest.mark.parametrize("block", of("text"), ids=str)
def test_lines_of_the_log_are_as_the_server_writes_them(block: Block) -> None:
    """Each of them, with what adds up: cached and fed are the prompt."""
    if block.note != "lines of the log":
        return
    for line in block.code.splitlines():
        assert LOG.fullmatch(line), line
        prompt, cached, fed = (
            int(found[1])
            for name in ("prompt", "cached", "fed")
            if (found := re.search(rf"{name} (\d+)", line))
        )
        assert cached + fed == prompt


def test_answers_of_commands_have_the_columns_that_commands_print() -> None:
    """Each heading, and each name of a line, stands in the code that prints it."""
    source = "".join(path.read_text() for path in (ROOT / "mlxcache" / "cli").rglob("*.py"))
    shown = [block for block in of("text") if block.note == "an answer of the command"]
    assert shown
    for block in shown:
        first, *lines = block.code.splitlines()
        names = re.split(r" {2,}", first)
        if len(names) == 1:
            names += [re.split(r" {2,}", line)[0] for line in lines]
        for name in names:
            assert re.search(rf'["n]{re.escape(name)}"', source), (block, name)
