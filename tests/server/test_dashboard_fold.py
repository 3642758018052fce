"""The dashboard on a phone: a first prompt that is computed, and a tree that is folded."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.conftest import ToyMaker
from tests.forked import served
from tests.server.api import Api, until, user, words
from tests.server.browser import browsing, installed
from tests.server.dashboard import Page

pytestmark = pytest.mark.skipif(installed() is None, reason="no browser with a driver is here")

HEAD = {"role": "system", "content": words(3, 80)}
SESSIONS = 14


@pytest.fixture(scope="module")
def api(toy: ToyMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    flags = ("--ram", "200MB", "--no-anticipate", "--prefill-chunk", "256")
    home = tmp_path_factory.mktemp("fold")
    with served("--model", str(toy("llama")), *flags, home=home) as server:
        yield Api(server)


@pytest.fixture(scope="module")
def page(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("browser")
    with browsing(folder) as browser:
        browser.look(width=360, height=740)
        yield Page(browser, api.url, folder)


def test_a_first_session_that_is_computed_is_told_of(api: Api, page: Page) -> None:
    """The page says that the session is being computed."""
    page.open()
    page.has("#sessions-none", "No session yet.")
    with api.replying("Tell me everything."):
        page.has("#sessions-none", "The first session is being computed")
        page.lacks("#sessions-none", "No session yet.")
    page.has("#session-rows", "Tell me everything.")


ROWS = "[...document.querySelectorAll('#tree-list summary')].filter(e => e.checkVisibility())"
FOCUSED = "document.activeElement.dataset.key"
TALL = "document.querySelector('#tree').getBoundingClientRect().height"


@pytest.fixture(scope="module")
def many(api: Api, page: Page) -> Page:
    """Many conversations on one system prompt."""
    for number in range(SESSIONS):
        text = f"{number} {words(10 + number, 30)}"
        api.chat([HEAD, user(text)], 4, prompt_cache_key=f"session-{number}")
    page.open()
    page.until("document.querySelectorAll('#session-rows tr').length >= args[0]", SESSIONS)
    page.until(f"{ROWS}.length")
    return page


def test_a_tree_is_folded_and_opens_branch_by_branch(many: Page) -> None:
    """A row of branches ends early, and says how many more there are."""
    assert many.run(f"return {ROWS}.length;") < SESSIONS
    assert many.run(f"return {TALL};") < 3 * 740
    assert many.texts("#tree-list .text") != []
    offered: list[str] = []
    for _ in range(6):
        folded = f"{ROWS}.filter(e => !e.parentElement.open && e.querySelector('.soft'))"
        many.run(f"{folded}.forEach(e => e.click());")
        offered += many.texts("#tree-list button")
        many.run("document.querySelectorAll('#tree-list button').forEach(e => e.click());")
    assert any(re.fullmatch(r"Show \d+ more", one) for one in offered)
    names = "\n".join(many.texts("#tree-list .ends"))
    for number in range(SESSIONS):
        assert re.search(rf"^{number} Story", names, re.MULTILINE), names


def test_what_was_opened_stays_open_when_the_tree_grows(api: Api, many: Page) -> None:
    """And the focus stays where it was."""
    leaf = f"{ROWS}.filter(e => !e.parentElement.open)[0]"
    many.run(f"const e = {leaf}; e.focus(); e.click();")
    key = many.run(f"return {FOCUSED};")
    before = many.text("#tree-count")
    api.chat([HEAD, user(f"new {words(77, 30)}")], 4, prompt_cache_key="another")
    many.until("document.querySelector('#tree-count').textContent !== args[0]", before)
    assert many.run(f"return {FOCUSED};") == key
    assert many.run("return document.activeElement.parentElement.open;")
    many.press("Enter", 13)
    assert not many.run("return document.activeElement.parentElement.open;")


def test_the_parts_of_memory_add_up_to_what_is_charged(api: Api, many: Page) -> None:
    """What is set aside for writing to disk is among them."""

    def agree() -> bool:
        told = many.text("#budgets .tier .figure")
        charged = sum(api.http.get("/v1/cache").json()["ram"]["kinds"].values())
        found = re.match(r"([\d.]+) MB used, ([\d.]+) MB reserved, of 200 MB", told)
        return found is not None and abs(float(found[1]) + float(found[2]) - charged / 1e6) < 1

    until(agree, 60, lambda: many.text("#budgets"))


def test_nothing_in_it_is_wider_than_the_window(many: Page) -> None:
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth;"
    assert many.run(wide) == 0
