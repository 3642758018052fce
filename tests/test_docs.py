"""README and docs/ say what is so: links, flags, endpoints and code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import typer

from mlxcache.api.app import create_app
from mlxcache.cli.main import app
from mlxcache.config import Settings, load_settings
from mlxcache.config.sources import READERS
from tests.served import Served, served

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
DEFAULT_URL = "http://127.0.0.1:8081"
NOT_RUN = re.compile(r"<!-- not run: .+ -->")


@dataclass(frozen=True)
class Block:
    """A fenced block of code; `run`: no comment above says that it is not run."""

    page: str
    line: int
    language: str
    code: str
    run: bool

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    start = None
    for i, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = i
            continue
        run = not (start and NOT_RUN.fullmatch(lines[start - 1]))
        code = "\n".join(lines[start + 1 : i])
        found.append(Block(page.name, start + 1, lines[start][3:], code, run))
        start = None
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in BLOCKS if block.language == "sh"]
LIVE = [block for block in BLOCKS if block.language in ("sh", "python") and block.run]


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its first two lines."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").split(heading, 1)[1]
    rows = re.findall(r"^\|(.+)\|$", text.split("\n\n| ", 1)[1].split("\n\n")[0], re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows[1:]]


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Files exist, and headings that are linked to."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), target


def serve_flags() -> dict[str, bool]:
    """The flags of `mlxcache serve`, and whether --help shows them."""
    command = cast(Any, typer.main.get_command(app)).commands["serve"]
    return {p.opts[0]: not p.hidden for p in command.params if p.opts[0] != "--help"}


def test_the_documented_settings_are_the_real_ones():
    """Flag, variable, key and default of each, and none besides."""
    rows = table("configuration.md", "## Settings")
    documented = [row[0].strip("`") for row in rows]
    assert sorted(documented) == sorted(f for f, shown in serve_flags().items() if shown)
    for flag, variable, key, default, _ in rows:
        name = flag.strip("`-").replace("-", "_")
        assert variable == f"`MLXCACHE_{name.upper()}`"
        assert key == ("" if name == "config" else f"`{name}`")
        if default.startswith("`"):
            value = getattr(Settings(), name)
            shown = "{}" if value == {} else str(value)
            assert default.strip("`").lower() == shown.lower(), name


def test_the_documented_endpoints_are_the_real_ones():
    """Method and path of each, and none besides."""
    documented = {
        f"{method} {path}"
        for row in table("http-api.md", "# HTTP API")
        for method, path in re.findall(r"`(\w+) ([^`]+)`", row[0])
    }
    routes = cast(Any, create_app(cast(Any, object())).routes)
    real = {
        f"{method} {route.path.replace(':path', '')}"
        for route in routes
        for method in route.methods - {"HEAD"}
    }
    assert documented == real


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_of_a_kind_that_is_checked(block):
    """A language, so that no code hides from the tests as plain text."""
    if block.language == "toml":
        assert set(tomllib.loads(block.code)) <= set(READERS)
    elif block.language == "json":
        json.loads(block.code)
    else:
        assert block.language in ("sh", "python", "text")


def test_a_documented_file_of_settings_is_accepted(tmp_path):
    """As it stands in the page."""
    files = [block for block in BLOCKS if block.language == "toml"]
    assert files
    for block in files:
        path = tmp_path / "config.toml"
        path.write_text(block.code)
        load_settings({}, {}, path)


@pytest.mark.parametrize("block", SHELL, ids=str)
def test_shell_blocks_parse_and_name_real_scripts_and_flags(block):
    """Also those that are not run."""
    subprocess.run(["sh", "-n"], input=block.code, text=True, check=True)
    for name in re.findall(r"(?:^|\s)((?:bin|examples)/[\w./]+)", block.code):
        assert (ROOT / name).is_file(), name
    for line in block.code.splitlines():
        if re.search(r"bin/serve|mlxcache serve", line):
            assert set(re.findall(r"--[a-z-]+", line)) <= set(serve_flags()), line


@pytest.fixture(scope="module")
def server(toy, tmp_path_factory):
    """A small model whose turns end by themselves."""
    model = toy("llama", emits={"<|im_end|>": 30})
    with served("--model", str(model), home=tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture
def path(tmp_path):
    """PATH with this Python and this checkout's command in front."""
    for name, arguments in (("python", ""), ("mlxcache", "-m mlxcache.cli.main ")):
        script = tmp_path / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        script.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


@pytest.mark.parametrize("block", LIVE, ids=str)
def test_blocks_run_against_a_server(block: Block, server: Served, path: str, tmp_path: Path):
    """As they stand, but for the port."""
    code = block.code.replace(DEFAULT_URL, server.url)
    if block.language == "python":
        command = [sys.executable, "-c", code]
    else:
        if "curl" in code and shutil.which("curl") is None:
            pytest.skip("there is no curl here")
        command = ["sh", "-e", "-c", code.replace("curl -s ", "curl -sSf ")]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environ = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
