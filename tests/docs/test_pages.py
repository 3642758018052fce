"""README and docs/ say what is so: links, pictures, flags and endpoints."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import pytest
from typer.core import TyperOption

from mlxcache.api.app import create_app
from mlxcache.cli.launch.clients import CLIENTS, ClientName
from mlxcache.cli.main import load
from mlxcache.config import SETTINGS, Settings
from tests.docs.blocks import BLOCKS, PAGES, ROOT

PICTURES = sorted((ROOT / "docs" / "images").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


def table(page: str, heading: str) -> list[list[str]]:
    """The rows of the first table below a heading, without its first two lines."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").split(heading, 1)[1]
    rows = re.findall(r"^\|(.+)\|$", text.split("\n\n| ", 1)[1].split("\n\n")[0], re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows[1:]]


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    """Files exist, and headings that are linked to; pictures say in words what they show."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.M)
    for target in re.findall(r"(?:\]\(|src=\")([^)\s\"]+)[)\"]", text):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), target
    assert all(len(words) > 20 for words in re.findall(r"!\[([^\]]*)\]\(", text))
    assert text.count("<img ") == len(re.findall(r'<img [^>]*alt="[^"]{20,}"', text))


def test_every_page_is_found_from_the_menu():
    """A page that nothing leads to is not read."""
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r": ([\w/.-]+\.md)$", menu, re.MULTILINE)) == pages


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_pictures_are_read_in_light_and_dark_and_aloud(picture: Path):
    """With colours for both, a title, and nothing from anywhere else."""
    text = picture.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    title = root.find(f"{SVG}title")
    assert title is not None
    assert title.text
    assert root.get("role") == "img"
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"href=|@import|url\(http|<script|<image", text)


def serve_flags() -> dict[str, bool]:
    """The flags of `mlxcache serve`, and whether --help shows them."""
    command = load("serve")
    flags = [p for p in command.params if isinstance(p, TyperOption)]
    return {p.opts[0]: not p.hidden for p in flags if p.opts[0] != "--help"}


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
            if name in SETTINGS and SETTINGS[name].metavar == "on|off":
                shown = "on" if value else "off"
            assert default.strip("`").lower() == shown.lower(), name


def test_the_size_of_a_clients_first_prompt_is_the_same_everywhere():
    """Measured once, in clients.md; the menu, the README and the quick start round it."""
    rows = table("clients.md", "## Which client?")
    told = {re.findall(r"`(\w+)`", name)[0]: tokens for name, _, tokens in rows}
    for name, client in CLIENTS.items():
        tokens = told[ClientName.CLAUDE if name == ClientName.ANYCLAUDE else name]
        assert client.first_prompt == int(tokens.split(";")[0].replace(",", ""))
    ours = f"{CLIENTS[ClientName.CLAUDE].about_first_prompt} with the demo model"
    for page in ("README.md", "docs/quickstart.md"):
        assert ours in " ".join((ROOT / page).read_text(encoding="utf-8").split())


def test_the_documented_endpoints_are_the_real_ones():
    """Method and path of each, and none besides."""
    page = (ROOT / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    rows = re.findall(r"^(?:## |\| )(.*?)(?: \||$)", page, re.MULTILINE)
    documented = {
        f"{method} {path}"
        for row in rows
        for method, path in re.findall(r"\b([A-Z]+) (/[^\s`,]*)", row)
    }
    routes = cast(Any, create_app(cast(Any, SimpleNamespace(default=None))).routes)
    real = {
        f"{method} {route.path.replace(':path', '')}"
        for route in routes
        for method in route.methods - {"HEAD"}
    }
    assert documented == real


def test_the_causes_that_break_caching_are_those_that_the_server_tells():
    """Each reason and cause in the first column of the table stands in that of explain."""
    told = {
        word
        for reason, cause, _ in table("how-caching-works.md", "### Reasons and causes")
        for word in re.findall(r"`(\w+)`", reason + cause)
    }
    rows = table("troubleshooting.md", "## What breaks caching")
    shown = {
        word
        for row in rows
        for code in re.findall(r"`([^`]+)`", row[0])
        for word in re.findall(r"\w+", code)
    }
    assert len(shown) > 20
    assert shown <= told


def test_the_layers_that_are_shown_are_those_of_the_contract():
    """In its order, and in the picture all of those that have a folder or a page of their own."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in contracts["contracts"] if c["type"] == "layers")
    level = {
        name.strip().removeprefix("mlxcache."): at
        for at, layer in enumerate(layers)
        for name in re.split(r"[|:]", layer)
    }
    (block,) = (block for block in BLOCKS if block.note == "the layers")
    shown = re.findall(r"^(\w+(?:, \w+)*)", block.code, re.MULTILINE)
    names = [name for line in shown for name in line.split(", ")]
    assert [level[name] for name in names] == sorted(level[name] for name in names)
    picture = (ROOT / "docs" / "images" / "layers.svg").read_text(encoding="utf-8")
    drawn = re.findall(r'y="(\d+)" class="name">([^<]+)<', picture)
    heights = {name: int(y) for y, text in drawn for name in text.split(", ")}
    above = {name for name in level if (ROOT / "mlxcache" / name).is_dir()}
    assert above | {"embed"} <= set(heights)
    assert all(heights[a] <= heights[b] for a in heights for b in heights if level[a] < level[b])
