"""What is made from code and figures is up to date: bin/reference writes it."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from tests.docs.blocks import ROOT


def script(name: str) -> ModuleType:
    """A script of bin/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "bin" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["cli.md", "http.md"])
def test_the_reference_is_what_the_code_says(page: str):
    """Every command, flag, endpoint, field and docstring; else run bin/reference."""
    written = (ROOT / "docs" / "reference" / page).read_text(encoding="utf-8")
    assert written == script("_reference").PAGES[page]()


def test_the_table_of_settings_is_what_the_code_says():
    """Flag, variable, key and default of each, and none besides; else run bin/reference."""
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    renew = script("_reference").PARTS["configuration.md"]
    assert page == renew(page)
    for wrong in (
        ("`8081` |", "`8082` |"),
        ("| no limit |", "| none |"),
        ("| `--queue` |", "| `--line` |"),
    ):
        assert renew(page.replace(*wrong, 1)) != page.replace(*wrong, 1)


@pytest.mark.parametrize("name", ["launch-menu.svg", "explain.svg"])
def test_the_pictures_of_a_terminal_are_what_commands_print(name: str):
    """Else run bin/terminal-pictures."""
    drawn = (ROOT / "docs" / "images" / name).read_text(encoding="utf-8")
    assert drawn == script("_terminal_pictures").PICTURES[name]()


def test_the_chart_is_what_the_benchmarks_say():
    """Its numbers are those of the tables; else run bin/reference."""
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    picture = (ROOT / "docs" / "images" / "fed.svg").read_text(encoding="utf-8")
    chart = script("_chart")
    assert picture == chart.chart(page)
    assert picture != chart.chart(page.replace("48 of 18,582", "4,800 of 18,582"))
