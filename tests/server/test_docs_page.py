"""The page of the HTTP API in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.api import Api
from tests.server.browser import browsing, installed
from tests.server.dashboard import Page

pytestmark = pytest.mark.skipif(installed() is None, reason="no browser with a driver is here")


@pytest.fixture(scope="module")
def page(strict: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder: Path = tmp_path_factory.mktemp("docs")
    with browsing(folder, logs=True) as browser:
        browser.look(width=1000)
        browser.open(f"{strict.url}/docs#post_v1_responses")
        found = Page(browser, strict.url, folder)
        found.until("document.querySelectorAll('.operation').length > 0")
        yield found


def test_every_endpoint_is_listed(page: Page, strict: Api) -> None:
    paths = strict.http.get("/openapi.json").json()["paths"]
    assert len(page.texts(".operation > summary")) == sum(map(len, paths.values()))
    assert not [one for one in page.browser.logged("browser") if one["level"] == "SEVERE"]


def test_a_link_to_an_endpoint_opens_it_with_its_fields(page: Page) -> None:
    page.has("#post_v1_responses", "previous_response_id")
    page.has("#post_v1_responses", "Not supported, a 400: adapters")


def test_a_field_opens_the_type_behind_it(page: Page) -> None:
    page.run(
        "const all = [...document.querySelectorAll('#post_v1_responses .fields summary')];"
        "all.find((one) => one.textContent.startsWith('reasoning')).click();"
    )
    page.has("#post_v1_responses .fields .fields", "effort")
