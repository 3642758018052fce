"""The dashboard in a real browser: texts, actions, and no requests elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxcache.cli.show import format_duration
from mlxcache.config import format_size
from tests.conftest import ToyMaker
from tests.forked import served
from tests.server.api import Api, until, user, words
from tests.server.browser import Browser, browsing, installed
from tests.server.dashboard import Page

pytestmark = pytest.mark.skipif(installed() is None, reason="no browser with a driver is here")

KEY = "dashboard-key-5d6e"
HEAD = {"role": "system", "content": words(3, 80)}
EVIL = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dashboard")


@pytest.fixture(scope="module")
def api(toy: ToyMaker, folder: Path) -> Iterator[Api]:
    """A server that asks for a key, with two conversations on one system prompt."""
    flags = ("--ram", "200MB", "--api-key", KEY, "--no-anticipate", "--prefill-chunk", "256")
    with served("--model", str(toy("llama")), *flags, home=folder) as server:
        found = Api(server)
        found.http.headers["Authorization"] = f"Bearer {KEY}"
        for session in ("first", "second"):
            found.chat([HEAD, user(f"The {session} question.")], prompt_cache_key=session)
        yield found


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Browser]:
    with browsing(folder, logs=True) as found:
        found.look(width=1280)
        yield found


@pytest.fixture(scope="module")
def page(api: Api, browser: Browser, folder: Path) -> Page:
    return Page(browser, api.url, folder)


@pytest.fixture
def opened(page: Page) -> Page:
    """The page after the key was entered."""
    page.open(KEY)
    page.has("#link", "live")
    page.until("document.querySelectorAll('#session-rows tr').length")
    return page


def session_of(api: Api, label: str) -> dict[str, Any]:
    found = api.http.get("/v1/sessions").json()["data"]
    return dict(next(one for one in found if one["label"] == label))


def named(api: Api, name: str) -> list[dict[str, Any]]:
    return [one for one in api.http.get("/v1/sessions").json()["data"] if one["name"] == name]


def test_it_asks_for_the_key_and_shows_nothing_without(page: Page) -> None:
    page.open()
    page.until("document.querySelector('#key-dialog').open")
    assert page.texts("#session-rows tr") == []
    page.write("#key", "a-wrong-key-1a2b")
    page.run("document.querySelector('#key-form').requestSubmit();")
    page.has("#key-wrong", "This key is wrong")
    page.write("#key", KEY)
    page.run("document.querySelector('#key-form').requestSubmit();")
    page.has("#session-rows", "The first question.")
    assert not page.run("return document.querySelector('#key-dialog').open;")
    kept = page.run("return [JSON.stringify(localStorage), document.cookie, location.href];")
    assert KEY not in json.dumps(kept)


def test_it_shows_what_is(api: Api, opened: Page) -> None:
    opened.has("#verdict", "warm")
    opened.has("#verdict-why", "The second question.")
    for name in ("first", "second"):
        opened.has("#session-rows tr", f"The {name} question.")
        opened.has("#recent-rows tr", f"The {name} question.")
    opened.has("#budgets", "reserved, of 200 MB")
    first = opened.texts("#figures dt")[:3]
    assert first == [
        "of all prompt tokens came from the cache",
        "of prefixes in RAM",
        "of prefixes on disk",
    ]
    opened.has("#chart", "warm")
    opened.until("document.querySelectorAll('#tree-picture .node').length >= 3")
    opened.has("#tree-picture text", "shared by 2")
    prompt = api.record_of("second")
    told = f"{prompt['cached_tokens']} from RAM, {prompt['fed_tokens']} computed"
    assert told in str(opened.run("return document.querySelector('.bar').title;"))


SIZES = [0, 999, 1_000, 4_530, 16_700_000, 123_450_000, 6_000_000_000, 2_300_000_000_000]
TIMES = [0.0, 0.004, 0.3, 4.53, 9.99, 13.2, 59.9, 60.0, 119.7, 193.0, 3599.0, 7300.0]
FORMATTED = "const f = await import('/dashboard/format.js'); return args[1].map(f[args[0]]);"


def test_sizes_and_times_read_as_on_the_command_line(opened: Page) -> None:
    assert opened.run(FORMATTED, "bytes", SIZES) == [format_size(one) for one in SIZES]
    assert opened.run(FORMATTED, "seconds", TIMES) == [format_duration(one) for one in TIMES]


def test_no_time_of_a_first_word_reaches_into_the_next_column(opened: Page) -> None:
    overlap = """
    const cell = document.querySelector("#recent-rows .first"), before = cell.textContent;
    const wider = args[0].filter(words => {
      cell.textContent = words;
      return cell.scrollWidth > cell.clientWidth;
    });
    cell.textContent = before;
    return wider;"""
    opened.until("document.querySelector('#recent-rows .first')")
    assert opened.run(overlap, [format_duration(one) for one in TIMES]) == []


NAMES = "[...document.querySelectorAll('#tree-picture text.name')]"
LONG = "Why does the worker wait for the whole minute after the queue was emptied?"
DRAWN = """(() => {
  const place = document.querySelector("#tree-picture"), picture = place.querySelector("svg");
  return picture && Math.abs(picture.getAttribute("width") - place.clientWidth) <= 1; })()"""
OUTSIDE = """
const edge = document.querySelector("#tree-picture svg").getBoundingClientRect().right;
const texts = [...document.querySelectorAll("#tree-picture text")];
return texts.filter(e => e.getBoundingClientRect().right > edge).map(e => e.textContent);"""
OVERLAPS = """
const texts = [...document.querySelectorAll("#tree-picture text")];
const boxes = texts.map(e => e.getBoundingClientRect());
return boxes.filter((a, i) => boxes.some((b, j) => j > i && a.left < b.right && b.left < a.right
  && a.top < b.bottom - 3 && b.top < a.bottom - 3)).length;"""


def test_names_in_the_tree_end_inside_the_picture(api: Api, opened: Page) -> None:
    """A long one is shortened, and whole where the pointer is; no text lies on another."""
    id = session_of(api, "second")["id"]
    api.http.patch(f"/v1/sessions/{id}", json={"name": LONG})
    name = f"{NAMES}.find(e => e.querySelector('title')?.textContent === args[0])"
    opened.until(name, LONG)
    shown = opened.run(f"return {name}.firstChild.textContent;", LONG)
    assert shown.endswith("…")
    assert LONG.startswith(shown[:-1])
    for width in (1280, 900, 1280):
        opened.browser.look(width=width)
        opened.until(DRAWN)
        assert opened.run(OUTSIDE) == []
        assert opened.run(OVERLAPS) == 0


FAST = """
const { state, changed } = await import("/dashboard/state.js");
for (const one of state.requests.values()) one.timing.first_token_s = 0.002;
changed("requests");
await new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)));
const picture = document.querySelector("#chart svg"), edge = picture.getBoundingClientRect();
const texts = [...picture.querySelectorAll("text")];
const cut = texts.filter(e => e.getBoundingClientRect().left < edge.left);
return [texts.some(e => e.textContent === "0.001 s"), cut.map(e => e.textContent)];"""


def test_the_smallest_time_of_the_chart_is_not_cut(opened: Page) -> None:
    opened.until("document.querySelector('#chart svg')")
    assert opened.run(FAST) == [True, []]


def test_a_single_token_is_told_in_the_singular(opened: Page) -> None:
    """The sentence on the last turn: "1 was computed"."""
    told = """
    const { state } = await import("/dashboard/state.js");
    const { sentence } = await import("/dashboard/hero.js");
    const one = {...[...state.requests.values()].find(r => r.status === "done")};
    return [1, 2].map(fed => sentence({...one, reuse: "warm", cached_tokens: 500,
      restored_tokens: 0, fed_tokens: fed, prompt_tokens: 500 + fed}).why);"""
    one, two = opened.run(told)
    assert "; 1 was computed, and" in one
    assert "; 2 were computed, and" in two


def test_what_came_from_disk_and_what_was_not_computed_are_told_apart(opened: Page) -> None:
    """In the sentence on the last turn, and in the bar of a request that was cut short."""
    told = """
    const { state, parts } = await import("/dashboard/state.js");
    const { sentence } = await import("/dashboard/hero.js");
    const { promptBar } = await import("/dashboard/bars.js");
    const one = {...[...state.requests.values()].find(r => r.status === "done")};
    const cut = {...one, cached_tokens: 500, restored_tokens: 200, fed_tokens: 30,
      prompt_tokens: 1500, reuse: "restored"};
    const bar = promptBar();
    bar.update(parts(cut), 1, cut.prompt_tokens);
    return [sentence(cut).why, bar.element.title, document.title];"""
    words, bar, title = opened.run(told)
    assert "500 of 1,500 tokens were reused, 200 of them from disk; 30 were computed" in words
    assert bar == "300 from RAM, 200 from disk, 30 computed, 970 not computed"
    held = opened.run("""const { state } = await import("/dashboard/state.js");
      const { short } = await import("/dashboard/format.js");
      return short(state.cache.tree_tokens);""")
    assert f"{held} tokens warm" in title


def test_a_request_is_seen_while_it_runs(api: Api, opened: Page) -> None:
    """Its phase, its reply growing, and its end, with no reload."""
    with api.replying("Tell me everything.", prompt_cache_key="long"):
        opened.until("document.querySelector('#running li[data-phase=decode]')")
        figure = "parseInt(document.querySelector('#running .figure')?.textContent ?? 0)"
        first = opened.until(figure)
        opened.until(f"{figure} > args[0]", first)
        assert "1 running" in opened.text("#requests-count")
    opened.until("document.querySelectorAll('#running li').length === 0")
    opened.has("#recent-rows tr", "Tell me everything.")


def test_a_request_without_a_label_has_the_name_of_its_session(api: Api, opened: Page) -> None:
    """And not only that of the program that sent it."""
    api.chat([HEAD, user("A question without a label.")])
    opened.has("#recent-rows tr", "A question without a label.")


def test_pin_rename_and_fork(api: Api, opened: Page) -> None:
    id = session_of(api, "first")["id"]
    opened.act(id, "Pin")
    opened.until("document.querySelector(args[0])", f'[data-id="{id}"][data-pinned="true"]')
    assert session_of(api, "first")["pinned"]
    title = "return document.querySelector(`[data-id='${args[0]}'] .acts button`).title;"
    assert "evicted last" in opened.run(title, id)
    opened.act(id, "Rename")
    opened.write("#name-text", EVIL)
    opened.click("#name-ok")
    opened.has("#session-rows b", EVIL)
    assert opened.run("return document.querySelectorAll('main img').length;") == 0
    opened.act(id, "Fork")
    opened.write("#name-text", "another way")
    opened.write("#name-at", "999999")
    opened.run("document.querySelector('#name-at').removeAttribute('max');")
    opened.click("#name-ok")
    opened.has("#name-wrong", "999999")
    opened.write("#name-at", "100")
    opened.click("#name-ok")
    opened.has("#session-rows b", "another way")
    (made,) = named(api, "another way")
    assert made["tokens"] == 100


def test_what_others_change_is_seen(api: Api, opened: Page) -> None:
    id = session_of(api, "second")["id"]
    api.http.patch(f"/v1/sessions/{id}", json={"name": "renamed elsewhere"})
    opened.has("#session-rows b", "renamed elsewhere")


def test_a_snapshot_is_saved_and_restored_by_a_drop(api: Api, opened: Page, folder: Path) -> None:
    id = session_of(api, "second")["id"]
    opened.act(id, "Download")
    file = folder / f"{id}.safetensors"
    until(file.exists, 60, lambda: str(list(folder.iterdir())))
    assert file.read_bytes() == api.http.get(f"/v1/sessions/{id}/snapshot").content
    before = {one["id"] for one in api.http.get("/v1/sessions").json()["data"]}
    opened.drop(file)
    opened.has("#toasts", "Restored")
    after = {one["id"] for one in api.http.get("/v1/sessions").json()["data"]}
    (made,) = after - before
    opened.until("document.querySelector(args[0])", f'[data-id="{made}"]')
    (folder / "broken.safetensors").write_bytes(b"no snapshot")
    opened.drop(folder / "broken.safetensors")
    opened.until("document.querySelector('.toast.wrong')")
    assert {one["id"] for one in api.http.get("/v1/sessions").json()["data"]} == after


UNDONE = """
const row = () => document.querySelector(`[data-id="${args[0]}"]`);
row().querySelector('.acts button[title="Remove"]').click();
const undo = document.activeElement;
await new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)));
const hidden = row() === null;
undo.click();
return [undo.textContent, hidden];
"""
HELD = """
document.querySelector(`[data-id="${args[0]}"] .acts button[title="Remove"]`).click();
const answer = await fetch('/v1/sessions', {headers: {Authorization: `Bearer ${args[1]}`}});
const there = (await answer.text()).includes(args[0]);
return [document.querySelector('.toast button') !== null, there];
"""


@pytest.mark.slow
def test_a_removal_is_undone_carried_out_or_left_behind(api: Api, opened: Page) -> None:
    """Nothing is gone before the time is over, or the page is left."""
    source = session_of(api, "first")["id"]
    ids = []
    for name in ("stays", "goes", "goes too"):
        answer = api.http.post(f"/v1/sessions/{source}/fork", json={"name": name})
        ids.append(answer.json()["id"])
        opened.has("#session-rows b", name)
    assert opened.run(UNDONE, ids[0]) == ["Undo", True]
    opened.has("#session-rows b", "stays")
    held, there = opened.run(HELD, ids[1], KEY)
    assert there or not held, "it is removed when the time to undo it is over"
    until(lambda: not named(api, "goes"), 90, lambda: str(named(api, "goes")))
    opened.act(ids[2], "Remove")
    opened.lacks("#session-rows b", "goes too")
    opened.browser.open(f"{opened.url}/dashboard/icon.svg")
    until(lambda: not named(api, "goes too"), 90, lambda: str(named(api, "goes too")))
    assert named(api, "stays")


def test_a_lost_prefix_is_shown_where_it_parts(api: Api, opened: Page) -> None:
    """Two texts side by side, the difference marked in both, as text."""
    ask = [user(words(5, 60)), {"role": "assistant", "content": "Yes."}, user("Go on.")]
    for files in ("alpha.py", f"beta.py {EVIL}"):
        system = {"role": "system", "content": f"You help. Open files: {files}\n{words(4, 80)}"}
        api.chat([system, *ask], tokens=2, prompt_cache_key="lossy")
    lost = api.wait("lossy", "done")["lost"] or api.record(api.record_of("lossy")["id"])["lost"]
    assert lost["reason"] == "system_changed"
    opened.has("#losses summary", "The system prompt changed")
    opened.has("#losses summary", f"{lost['lost_tokens']:,} tokens")
    opened.has("#losses details[open] del", "alpha")
    opened.has("#losses details[open] ins", "beta")
    opened.has("#losses details[open] pre", f"beta.py {EVIL}")
    assert opened.run("return document.querySelectorAll('main img').length;") == 0
    assert lost["advice"] in opened.text("#losses .advice")
    opened.has("#verdict", "cold")


def test_a_chat_starts_warm_at_its_second_turn(opened: Page) -> None:
    # Warm is half of the prompt or more, also if the drawn reply has control tokens as text.
    for number, more in ((1, 500), (2, 20)):
        opened.write("#chat-text", f"Question {number}, and {words(number, more)}")
        opened.run("document.querySelector('#chat').requestSubmit();")
        opened.until("document.querySelectorAll('#talk .kind').length === args[0]", number)
    kinds = opened.texts("#talk .kind")
    assert kinds[1] == "warm"
    assert "reused" in opened.texts("#talk .answer .note")[1]


COLOURS = """
const style = getComputedStyle(document.body);
const light = colour => colour.match(/\\d+/g).map(Number).reduce((a, b) => a + b);
return [light(style.backgroundColor), light(style.color)];
"""


def test_light_and_dark_by_the_system_and_by_the_switch(opened: Page) -> None:
    def is_dark() -> bool:
        paper, ink = opened.run(COLOURS)
        assert abs(paper - ink) > 400
        return bool(paper < ink)

    opened.browser.look(width=1280, scheme="dark")
    assert is_dark()
    opened.browser.look(width=1280, scheme="light")
    assert not is_dark()
    opened.click("#theme")
    opened.click("#theme")
    assert opened.text("#theme-name") == "Colours: dark"
    assert is_dark()
    opened.open()
    opened.has("#link", "live")
    assert is_dark(), "the choice is kept"
    opened.click("#theme")
    assert not is_dark()


BEYOND = """
return [...document.querySelectorAll('main *')].filter(e => e.checkVisibility()
  && !e.closest('.picture, .unseen, thead') && e.getBoundingClientRect().right > innerWidth + 1
).map(e => e.outerHTML.slice(0, 200));
"""
SMALL = """
return [...document.querySelectorAll('main button')].filter(e => e.checkVisibility()
  && e.getBoundingClientRect().height < 24).map(e => e.id);
"""


@pytest.mark.parametrize("width", [360, 768])
def test_narrow_windows_need_no_sideways_scroll(opened: Page, width: int) -> None:
    opened.browser.look(width=width, height=740)
    try:
        opened.until("document.querySelectorAll('#recent-rows tr').length")
        wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth;"
        assert opened.run(wide) == 0
        assert opened.run(BEYOND) == []
        assert opened.run(SMALL) == []
    finally:
        opened.browser.look(width=1280)


def test_by_keyboard_and_by_screen_reader(opened: Page) -> None:
    """Everything that can be pressed has a name and shows that it has the focus."""
    opened.press("Tab", 9)
    assert opened.run("return document.activeElement.className;") == "skip"
    seen = set()
    for _ in range(40):
        opened.press("Tab", 9)
        found = opened.run(
            "const e = document.activeElement; const s = getComputedStyle(e);"
            "return [e.id || e.className.baseVal || e.className, s.outlineStyle + s.outlineWidth,"
            " getComputedStyle(e.querySelector?.('.halo') ?? e).strokeWidth];"
        )
        seen.add(found[0])
        assert found[1] != "none0px" or found[2] == "2px", f"no focus is shown on {found[0]}"
    assert {"theme", "restore", "icon"} <= seen
    opened.run("document.querySelector('.node[tabindex=\"0\"]').focus();")
    opened.press("ArrowRight", 39)
    assert "tokens from" in opened.run("return document.activeElement.getAttribute('aria-label');")
    assert "It begins" in opened.text("#tree-detail")
    nodes = opened.browser.tool("Accessibility.getFullAXTree")["nodes"]
    spoken = [
        (one["role"]["value"], one.get("name", {}).get("value", ""))
        for one in nodes
        if not one.get("ignored") and "role" in one
    ]
    roles = {role for role, _ in spoken}
    assert {"banner", "navigation", "main", "contentinfo", "table", "status", "heading"} <= roles
    nameless = ("button", "textbox", "img", "progressbar", "dialog", "region", "table")
    assert [role for role, name in spoken if role in nameless and not name] == []
    regions = {name for role, name in spoken if role == "region"}
    assert {"Requests", "Sessions", "Prefix tree", "Lost prefixes", "Try it"} <= regions


BREAKABLE = """
const plain = window.fetch;
window.streams = [];
window.fetch = (url, options) => {
  if (url !== '/v1/live') return plain(url, options);
  const one = new AbortController();
  window.streams.push(one);
  return plain(url, {...options, signal: one.signal});
};
"""


def test_it_comes_back_when_the_stream_breaks(api: Api, page: Page) -> None:
    script = page.browser.tool("Page.addScriptToEvaluateOnNewDocument", source=BREAKABLE)
    try:
        page.open(KEY)
        page.has("#link", "live")
        page.run("streams[0].abort();")
        page.until("streams.length > 1")
        page.has("#link", "live")
        id = session_of(api, "second")["id"]
        api.http.patch(f"/v1/sessions/{id}", json={"name": "told after it broke"})
        page.has("#session-rows b", "told after it broke")
    finally:
        page.browser.tool("Page.removeScriptToEvaluateOnNewDocument", **script)


def test_no_error_and_no_other_host(page: Page, api: Api) -> None:
    """In all that was done above. What the server refused on purpose is told as such."""
    page.open(KEY)
    page.has("#link", "live")
    expected = ("401 (Unauthorized)", "400 (Bad Request)")
    lines = [one["message"] for one in page.browser.logged("browser") if one["level"] == "SEVERE"]
    assert [line for line in lines if not any(words in line for words in expected)] == []
    events = [json.loads(one["message"])["message"] for one in page.browser.logged("performance")]
    asked = {
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    }
    assert len(asked) > 20
    own = (f"{api.url}/", "data:", "blob:", "chrome:")  # the browser's own first page
    assert {url for url in asked if not url.startswith(own)} == set()


def test_whether_the_model_takes_images_is_shown(opened, browser, toy_muse, tmp_path):
    assert "takes images" not in opened.text("#model")
    flags = ("--trust-remote-code", "--ram", "200MB")
    with served("--model", str(toy_muse), *flags, home=tmp_path) as server:
        page = Page(browser, server.url, tmp_path)
        page.open()
        page.has("#model", "tokens of context, takes images")
