"""A page of another origin can do nothing to this server, in a real browser."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import ToyMaker
from tests.forked import served
from tests.server.api import CHAT, COUNT, MESSAGES, Api, user
from tests.server.browser import EVIL, Browser, browsing, installed, pages

pytestmark = pytest.mark.skipif(installed() is None, reason="no browser with a driver is here")

SECRET = "The launch code is 4711."
BODY: dict[str, Any] = {"model": "m", "messages": [user("Hi")], "max_tokens": 2}
ATTEMPTS = """
const [base, session, chat, file] = args;
const snapshot = Uint8Array.from(atob(file), c => c.charCodeAt(0));
const bodyOf = path => path.endsWith('stolen') ? snapshot : path.endsWith('fork') ? '{}' : chat;
const read = [], waiting = [];
const soon = (work) => waiting.push(Promise.race([work, new Promise(r => setTimeout(r, 20000))]));
const grab = async (path, options) => {
  try {
    const r = await fetch(base + path, options);
    if (r.type !== 'opaque' && r.type !== 'opaqueredirect')
      read.push([options.method + ' ' + path, r.status, await r.text()]);
  } catch (e) {}
};
const GETS = ['/health', '/v1/models', '/api/v0/models', '/v1/sessions', '/v1/cache',
  '/v1/cache/check', '/v1/requests', '/v1/cache/tree',
  '/dashboard', '/dashboard/app.js', '/metrics', `/v1/sessions/${session}`,
  `/v1/sessions/${session}/snapshot`, `/v1/sessions/${session}/snapshot?format=mlx-lm`];
const POSTS = ['/v1/chat/completions', '/v1/completions', '/v1/responses', '/v1/messages',
  '/v1/messages/count_tokens', '/v1/cache/warm', '/v1/cache/prune', '/v1/sessions?name=stolen',
  `/v1/sessions/${session}/fork`];
for (const mode of ['cors', 'no-cors']) {
  for (const path of GETS) soon(grab(path, {method: 'GET', mode}));
  for (const path of POSTS)
    for (const type of ['text/plain', 'application/json', 'application/x-www-form-urlencoded'])
      soon(grab(path, {method: 'POST', mode, body: bodyOf(path), headers: {'Content-Type': type}}));
}
for (const path of POSTS) {
  try { navigator.sendBeacon(base + path, bodyOf(path)); } catch (e) {}
  const frame = document.createElement('iframe');
  frame.name = 'f' + Math.random();
  const form = document.createElement('form');
  form.action = base + path; form.method = 'POST'; form.enctype = 'text/plain';
  form.target = frame.name;
  const field = document.createElement('input');
  field.name = chat.slice(0, -1) + ', "x": "'; field.value = '"}';
  form.append(field);
  (document.body || document.documentElement).append(frame, form);
  soon(new Promise(r => { frame.onload = r; form.submit(); }));
}
for (const path of GETS) {
  for (const kind of ['img', 'script', 'iframe', 'link']) {
    const one = document.createElement(kind);
    one.rel = 'stylesheet';
    one[kind === 'link' ? 'href' : 'src'] = base + path;
    soon(new Promise(r => { one.onload = one.onerror = r; }));
    (document.body || document.documentElement).append(one);
  }
  try {
    const events = new EventSource(base + path);
    soon(new Promise(r => { events.onerror = r;
      events.onmessage = e => { read.push(['events ' + path, 200, e.data]); r(); } }));
  } catch (e) {}
  try {
    const socket = new WebSocket(base.replace('http', 'ws') + path);
    soon(new Promise(r => { socket.onerror = socket.onclose = r;
      socket.onopen = () => { read.push(['socket ' + path, 101, '']); r(); } }));
  } catch (e) {}
}
await Promise.all(waiting);
for (const path of [`/v1/sessions/${session}`, '/v1/cache?pinned=true'])
  for (const method of ['DELETE', 'PATCH'])
    await grab(path, {method, mode: 'cors', body: '{"name": "stolen", "pinned": true}'});
return read;
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def site() -> Iterator[int]:
    with pages() as port:
        yield port


@pytest.fixture(scope="module")
def victim(toy: ToyMaker, tmp_path_factory: pytest.TempPathFactory, site: int) -> Iterator[Api]:
    """A server as it is by itself, with a conversation on it; one other page is let in."""
    friend = f"http://localhost:{site}"
    flags = ("--ram", "200MB", "--allow-origin", friend, "--no-anticipate")
    with served("--model", str(toy("llama")), *flags, home=tmp_path_factory.mktemp("v")) as server:
        api = Api(server)
        api.chat([user(SECRET)], tokens=4, prompt_cache_key=SECRET)
        yield api


def state(api: Api) -> dict[str, Any]:
    """State that a page could have changed."""
    figures = api.http.get("/v1/cache").json()
    kept = ("requests", "tokens", "sessions", "segments", "checkpoints", "evictions")
    return {
        "figures": {name: figures[name] for name in kept},
        "disk": figures["disk"]["used_bytes"] > 0,
        "sessions": api.http.get("/v1/sessions").json()["data"],
        "requests": [one["id"] for one in api.http.get("/v1/requests").json()["data"]],
    }


def session_of(api: Api) -> str:
    sessions = api.http.get("/v1/sessions").json()["data"]
    return str(next(one["id"] for one in sessions if one["label"] == SECRET))


def attempts(api: Api, base: str) -> tuple[Any, ...]:
    """What the script is given: all that a page could know, and more."""
    snapshot = api.http.get(f"/v1/sessions/{session_of(api)}/snapshot").content
    encoded = base64.b64encode(snapshot).decode()
    return ATTEMPTS, base, session_of(api), json.dumps(BODY), encoded


PLACES = {
    "another port": "http://127.0.0.1:{site}",
    "a public name": f"http://{EVIL}:{{site}}",
    "a hidden origin": "data:text/html,<body>",
}


@pytest.mark.parametrize(
    ("host", "place"),
    [
        ("127.0.0.1", "another port"),
        ("127.0.0.1", "a hidden origin"),
        ("localhost", "a public name"),
        (EVIL, "a public name"),
        (EVIL, "another port"),
    ],
)
def test_a_page_of_another_origin(browser, victim, site, place, host):
    """Whatever it sends, nothing is read, generated, warmed, cleared, restored or exported."""
    tried = attempts(victim, victim.url.replace("127.0.0.1", host))
    before = state(victim)
    browser.open(PLACES[place].format(site=site))
    read = browser.run(*tried)
    assert read == []
    assert state(victim) == before


def test_a_page_whose_name_was_rebound(browser: Browser, victim: Api) -> None:
    """To the browser it and the server are one origin; all that it reads is that it may not."""
    base = victim.url.replace("127.0.0.1", EVIL)
    tried = attempts(victim, base)
    before = state(victim)
    browser.open(f"{base}/health")
    read = browser.run(*tried)
    assert len(read) > 40
    assert {status for _, status, _ in read} == {403}
    said = json.dumps(read)
    assert "4711" not in said
    assert session_of(victim) not in "".join(text for _, _, text in read)
    assert state(victim) == before


def test_the_attempts_are_real(browser: Browser, victim: Api, site: int) -> None:
    """The page that was let in does with the same script what the others tried."""
    tried, session = attempts(victim, victim.url), session_of(victim)
    before = state(victim)
    browser.open(f"http://localhost:{site}")
    read = browser.run(*tried)
    assert SECRET in json.dumps(read)
    done = {what for what, status, _ in read if status in (200, 201)}
    fork, restore = f"/v1/sessions/{session}/fork", "/v1/sessions?name=stolen"
    for path in (CHAT, MESSAGES, COUNT, "/v1/cache/warm", fork, restore):
        assert f"POST {path}" in done, [one for one in read if path in one[0]]
    assert {"GET /v1/sessions", f"DELETE /v1/sessions/{session}"} <= done
    after = state(victim)
    assert after["figures"]["requests"]["total"] > before["figures"]["requests"]["total"]
    assert session not in {one["id"] for one in after["sessions"]}
