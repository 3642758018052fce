"""The dashboard's files: headers, references between them, and forbidden calls."""

from __future__ import annotations

import re

import httpx
import pytest

from mlxcache.api.dashboard import FILES
from mlxcache.api.http import ApiSettings

PAGES = ("/dashboard", "/docs")
TEXTS = {path: content.decode() for path, (_, content) in FILES.items()}


@pytest.fixture
def settings() -> ApiSettings:
    return ApiSettings(api_key="a-key-of-some-length")


async def test_the_page_needs_no_key_and_the_data_does(client: httpx.AsyncClient) -> None:
    for path in FILES:
        assert (await client.get(path)).status_code == 200, path
    for path in ("/v1/live", "/v1/cache/tree", "/v1/sessions", "/dashboard/none.js"):
        assert (await client.get(path)).status_code == 401, path
    known = {"Authorization": "Bearer a-key-of-some-length"}
    assert (await client.get("/dashboard/none.js", headers=known)).status_code == 404
    assert (await client.get("/dashboard/../app.py", headers=known)).status_code == 404


async def test_the_servers_bare_address_leads_to_the_page(client: httpx.AsyncClient) -> None:
    """It is what people type, and it needs no key either."""
    response = await client.get("/")
    assert (response.status_code, response.headers["location"]) == (307, "/dashboard")


async def test_a_strict_policy_goes_with_each_file(client: httpx.AsyncClient) -> None:
    response = await client.get("/dashboard")
    policy = dict(
        part.strip().partition(" ")[::2]
        for part in response.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[kind] for kind in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["x-frame-options"] == "DENY"
    for path in FILES:
        served = await client.get(path)
        assert (
            served.headers["content-security-policy"] == response.headers["content-security-policy"]
        )


def test_each_colour_stands_once() -> None:
    """Each has a light and a dark value on one line, so that neither is forgotten in a change."""
    names = [name for text in TEXTS.values() for name in re.findall(r"(--[\w-]+):", text)]
    twice = {name for name in names if names.count(name) > 1}
    assert twice == set()
    assert (
        len([line for line in TEXTS["/dashboard/base.css"].split("\n") if "light-dark(#" in line])
        > 12
    )


async def test_a_browser_that_has_a_file_is_not_sent_it_again(client: httpx.AsyncClient) -> None:
    first = await client.get("/dashboard/app.js")
    again = await client.get("/dashboard/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = await client.get("/dashboard/app.js", headers={"If-None-Match": '"old"'})
    assert other.status_code == 200


async def test_a_link_may_lead_to_it_and_no_page_may_take_its_parts(
    client: httpx.AsyncClient,
) -> None:
    link = {
        "sec-fetch-site": "cross-site",
        "sec-fetch-mode": "navigate",
        "sec-fetch-dest": "document",
    }
    assert (await client.get("/dashboard", headers=link)).status_code == 200
    assert (
        await client.get("/dashboard", headers=link | {"sec-fetch-dest": "iframe"})
    ).status_code == 403
    assert (await client.get("/dashboard/app.js", headers=link)).status_code == 403


def test_all_that_is_named_is_there() -> None:
    named = {one for page in PAGES for one in re.findall(r'(?:src|href)="(/[^"]*)"', TEXTS[page])}
    for path, text in TEXTS.items():
        if path.endswith(".js"):
            named |= {f"/dashboard/{name}" for name in re.findall(r'from "\./([^"]+)"', text)}
    assert named - {"/openapi.json"} | set(PAGES) == set(FILES)


def test_each_element_that_a_script_asks_for_is_on_the_page() -> None:
    own = {"/docs": {"/dashboard/docs.js"}}
    for page in PAGES:
        scripts = own.get(page) or {path for path in FILES if path.endswith(".js")} - own["/docs"]
        check_elements(page, "\n".join(TEXTS[path] for path in scripts))


def check_elements(page: str, scripts: str) -> None:
    there = set(re.findall(r'\bid="([^"]+)"', TEXTS[page]))
    assert set(re.findall(r'byId\("([^"]+)"\)', scripts)) <= there
    icons = set(re.findall(r'(?:icon|act)\("([a-z]+)"', scripts))
    assert {f"i-{name}" for name in icons} <= there


def test_no_text_is_taken_for_html_and_no_other_host_is_named() -> None:
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function"
    )
    for path, text in TEXTS.items():
        assert not re.search(forbidden, text), path
        hosts = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
        assert not hosts, (path, hosts)  # that one is the name of a namespace
        assert not re.search(r"\bon[a-z]+=\"|style=\"", text), path
        assert text.count("\n") < 300, path
