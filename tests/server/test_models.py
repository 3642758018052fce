"""Several models on one server: chosen by name, one budget, warm after each switch.

`routed.json`: requests of Claude Code 2.1.197 in a terminal, with shortened texts. Its title and
the requests of its sub-agent (`of`) name another model than the main conversation. `same`: how many
messages of the earlier request of that kind a request repeats.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from prometheus_client import parser

from tests.conftest import ToyMaker
from tests.forked import served
from tests.scripted import scripted
from tests.server.api import CHAT, MESSAGES, Api, events, until, user, words
from tests.server.browser import browsing, installed
from tests.server.dashboard import Page
from tests.server.recording import read_json
from tests.toys.adapter import make_adapter

NEW = 64
ROUTED = read_json("routed.json")


@pytest.fixture(scope="module")
def models(toy: ToyMaker) -> dict[str, Path]:
    # most of each is its weights, so that a budget can be too small for both
    return {
        "large": toy("llama", intermediate=10_000),
        "small": toy("qwen3_5", intermediate=8_000),
    }


@pytest.fixture(scope="module")
def config(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "config.toml"
    tables = [f'[models.{name}]\npath = "{path}"\n' for name, path in models.items()]
    file.write_text('[route]\n"claude-haiku-*" = "small"\n\n' + "\n".join(tables))
    return file


@pytest.fixture(scope="module")
def api(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    home = tmp_path_factory.mktemp("home")
    flags = ("--config", str(config), "--ram", "400MB")
    with scripted(ROUTED["script"], *flags, home=home) as server:
        yield Api(server)


def states(api: Api) -> dict[str, str]:
    return {one["id"]: one["state"] for one in api.http.get("/v1/models").json()["data"]}


def ask(api: Api, model: str, messages: list[Any], **more: Any) -> Any:
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, **more}
    response = api.http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def newest(api: Api) -> dict[str, Any]:
    found: dict[str, Any] = api.http.get("/v1/requests?limit=1").json()["data"][0]
    return found


def test_a_request_gets_the_model_that_it_names(api: Api) -> None:
    for name, label in (
        ("large", "large"),
        ("SMALL", "small"),
        ("claude-haiku-9", "small"),
        ("gpt-17", "large"),
    ):
        ask(api, name, [user(words(1, 20))])
        assert newest(api)["model"] == label, name
    body = {"model": "claude-haiku-4-5", "max_tokens": 4, "messages": [user("Hello.")]}
    assert api.http.post(MESSAGES, json=body).status_code == 200
    assert newest(api)["model"] == "small"
    assert states(api) == {"large": "loaded", "small": "loaded"}
    figures = api.http.get("/v1/cache").json()
    assert [one["label"] for one in figures["models"]] == ["large", "small"]
    assert figures["memory"]["used_bytes"] <= figures["memory"]["limit_bytes"] == 400_000_000


def test_models_are_unloaded_and_loaded_on_request(api: Api) -> None:
    said = ask(api, "small", talk := [user(words(2, 300))])["choices"][0]["message"]
    found = api.http.post("/v1/models/small/unload").json()
    assert (found["id"], found["state"], found["unloaded_for"]) == ("small", "unloaded", "asked")
    assert states(api)["large"] == "loaded"
    ask(api, "small", [*talk, said, user("Go on.")])
    record = newest(api)
    assert record["cached_tokens"] > 250
    assert record["fed_tokens"] <= NEW
    api.http.post("/v1/models/small/unload")
    assert api.http.post("/v1/models/small/load").status_code == 200
    until(lambda: states(api)["small"] == "loaded", 10, lambda: str(states(api)))
    assert api.http.post("/v1/models/nobody/load").status_code == 404
    assert api.http.post("/v1/models/SMALL/load").json()["id"] == "small"


def test_lm_studios_list_has_each_model(api: Api) -> None:
    ask(api, "small", [user("Hello.")])
    listed = api.http.get("/api/v0/models").json()["data"]
    assert [(one["id"], one["arch"]) for one in listed] == [
        ("large", "llama"),
        ("small", "qwen3_5"),
    ]
    assert api.http.get("/api/v0/models/claude-haiku-9").json()["arch"] == "qwen3_5"


def test_titles_and_sub_agents_leave_the_conversation_warm(api: Api) -> None:
    """They go to the small model; each turn of the large one feeds what is new in it."""
    before: dict[str, int] = {}
    talks: dict[str, list[Any]] = {}
    kept = large_tree(api)
    for request in ROUTED["requests"]:
        of = request["of"]
        talks[of] = [*talks.get(of, [])[: request["same"]], *request["messages"]]
        body = ROUTED["bodies"][of] | {"messages": talks[of]}
        response = api.post(MESSAGES, body)
        assert response.status_code == 200, response.text
        record = api.finished(response.headers["x-mlxcache-request"])
        assert record["model"] == ("large" if of == "main" else "small"), of
        held = large_tree(api)
        if of != "main":
            assert held == kept, of
        elif of in before:
            new = record["prompt_tokens"] - before[of]
            assert record["fed_tokens"] <= new + NEW, record
            assert record["cached_tokens"] > 500
            assert record["lost"] is None
        before[of], kept = record["prompt_tokens"] + record["generated_tokens"], held
    assert [one["of"] for one in ROUTED["requests"]].count("main") == 5


def large_tree(api: Api) -> int:
    """Bytes of the large model's KV, once nothing is computed ahead any more."""
    seen = [-1]

    def settled() -> bool:
        kept = api.http.get("/v1/cache").json()["models"][0]["kv_bytes"]
        seen.append(kept)
        return bool(kept == seen[-2])

    until(settled, 10, lambda: str(seen))
    return seen[-1]


@pytest.mark.slow
@pytest.mark.skipif(installed() is None, reason="no browser with its driver")
def test_the_dashboard_shows_each_model(api: Api, tmp_path: Path) -> None:
    ask(api, "small", [user(words(21, 40))])
    with browsing(tmp_path) as browser:
        page = Page(browser, api.url, tmp_path)
        page.open()
        page.has("#models li", "smallloaded, weights")
        page.has("#model", "and 1 more model")
        page.has("#budgets", "weights of the models")
        page.has("#recent-rows tr:first-child .of", "small")
        api.http.post("/v1/models/small/unload")
        page.has("#models li[data-state=unloaded]", "smallunloaded on request")
        told = page.run("return document.querySelector('#models .budget').ariaLabel;")
        assert "of the budget" in told


def test_figures_count_all_models(api: Api) -> None:
    for name, turn in (("large", 11), ("small", 12), ("small", 13)):
        ask(api, name, [user(words(turn, 60))])
    records = api.http.get("/v1/requests?limit=1000").json()["data"]
    assert {one["model"] for one in records} == {"large", "small"}
    figures = api.http.get("/v1/cache").json()
    assert figures["requests"]["total"] == len(records)
    for kind in ("prompt", "cached", "fed", "generated"):
        assert figures["tokens"][kind] == sum(one[f"{kind}_tokens"] for one in records), kind
    told = figures["models"]
    assert figures["ram"]["kinds"]["weights"] == sum(one["weights_bytes"] for one in told)
    assert figures["ram"]["used_bytes"] == sum(one["kv_bytes"] for one in told)
    assert sum(figures["ram"]["kinds"].values()) == figures["memory"]["used_bytes"]
    assert figures["ram"]["limit_bytes"] == 400_000_000
    api.http.post("/v1/models/small/unload")
    small = next(x for x in api.http.get("/v1/cache").json()["models"] if x["label"] == "small")
    assert (small["unloaded_for"], small["progress"]) == ("asked", None)
    read = parser.text_string_to_metric_families(api.http.get("/metrics").text)
    metrics = {
        (sample.name.removeprefix("mlxcache_"), sample.labels.get("model")): sample.value
        for family in read
        for sample in family.samples
    }
    assert metrics["fed_tokens_total", None] == sum(one["fed_tokens"] for one in records)
    assert metrics["model_loaded", "large"] == 1
    assert metrics["model_loaded", "small"] == 0
    assert metrics["model_loads_total", "small"] == small["loads"]
    assert metrics["model_unloads_total", "small"] == small["unloads"] > 0
    assert metrics["model_size_bytes", "small"] == small["size_bytes"] > small["weights_bytes"]


@pytest.fixture(scope="module")
def one_fits(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    home = tmp_path_factory.mktemp("one")
    with served("--config", str(config), "--ram", "70MB", home=home) as server:
        yield Api(server)


class TestOneAtATime:
    """A budget that holds one of two models with its KV."""

    def test_twenty_switches_feed_only_what_is_new(self, one_fits: Api) -> None:
        api = one_fits
        talks: dict[str, list[Any]] = {"large": [user(words(3, 600))]}
        talks["small"] = [user(words(4, 600))]
        before: dict[str, int] = {}
        for turn in range(10):
            for name, talk in talks.items():
                reply = ask(api, name, talk)
                record = newest(api)
                assert record["model"] == name
                if turn:
                    new = record["prompt_tokens"] - before[name]
                    assert record["fed_tokens"] <= new + NEW, (turn, name, record)
                    assert record["lost"] is None
                before[name] = record["prompt_tokens"] + record["generated_tokens"]
                talk += [reply["choices"][0]["message"], user(words(100 + turn, 20))]
                memory = api.http.get("/v1/cache").json()["memory"]
                assert memory["high_water_bytes"] <= memory["limit_bytes"]
        loads = {one["label"]: one["loads"] for one in api.http.get("/v1/cache").json()["models"]}
        assert sum(loads.values()) >= 18, loads

    @pytest.mark.slow
    def test_no_weights_are_read_while_the_other_models_reply_is_written(self, one_fits):
        api = one_fits
        for name in ("small", "large"):
            ask(api, name, [user("Hello.")])
        seen = api.served.output.count("small: loading the weights")
        done: list[str] = []

        def other() -> None:
            ask(api, "small", [user(words(8, 30))])
            done.append("small")

        asking = Thread(target=other)
        with api.replying(words(7, 30), model="large", max_tokens=3000):
            until(lambda: newest(api)["status"] == "decode", 30, lambda: str(newest(api)))
            asking.start()
            for _ in range(20):
                assert states(api) == {"large": "loaded", "small": "unloaded"}
                assert api.served.output.count("small: loading the weights") == seen
                time.sleep(0.05)
        asking.join(60)
        assert done == ["small"]
        assert api.served.output.count("small: loading the weights") == seen + 1


def session_of(api: Api, model: str, turn: int, **more: Any) -> dict[str, Any]:
    """The session of a new conversation with a model."""
    ask(api, model, [user(words(turn, 100))], **more)
    until(lambda: newest(api)["session"] is not None, 10, lambda: str(newest(api)))
    name = newest(api)["session"]
    listed = api.http.get("/v1/sessions").json()["data"]
    return next(o for o in listed if name in (o["id"], o["label"]) and o["model"] == model)


@pytest.mark.parametrize("name", ["large", "small"])
def test_a_session_is_forked_saved_and_restored_in_its_own_model(api: Api, name: str) -> None:
    found = session_of(api, name, 31 + len(name))
    assert (found["model"], found["ram_bytes"] > 0) == (name, True)
    path = f"/v1/sessions/{found['id']}"
    fork = api.http.post(f"{path}/fork", json={"name": "fork"}).json()
    assert (fork["model"], fork["tokens"]) == (name, found["tokens"])
    assert fork["ram_bytes"] == found["ram_bytes"]
    patched = api.http.patch(f"/v1/sessions/{fork['id']}", json={"pinned": True}).json()
    assert (patched["model"], patched["pinned"], patched["ram_bytes"] > 0) == (name, True, True)
    for form in ("mlxcache", "mlx-lm"):
        file = api.http.get(f"{path}/snapshot?format={form}").content
        made = api.http.post("/v1/sessions", content=file)
        assert made.status_code == 201, made.text
        assert (made.json()["model"], made.json()["tokens"]) == (name, found["tokens"])
    shown = api.http.get("/v1/cache/tree").json()["nodes"]
    own = [one for one in shown if found["id"] in one["sessions"] and one["tokens"]]
    assert {one["model"] for one in own} == {name}
    assert sum(one["ram_tokens"] for one in own) == found["tokens"]
    with api.http.stream("GET", "/v1/live?parts=sessions") as live:
        body = next(body for event, body in events(live) if event == "sessions")
    assert {one["id"]: one["ram_bytes"] > 0 for one in body["data"]}[found["id"]]


def test_a_label_on_two_models_is_a_session_of_each(api: Api) -> None:
    """As when an agent's titles go to another model: each says which of them is the other."""
    both = {one: session_of(api, one, 41, prompt_cache_key="agent") for one in ("large", "small")}
    for name, other in (("large", "small"), ("small", "large")):
        shown = api.http.get(f"/v1/sessions/{both[name]['id']}").json()
        assert shown["model"] == name
        (related,) = shown["related"]
        assert (related["id"], related["model"]) == (both[other]["id"], other)


def test_a_prefix_is_warmed_in_the_model_that_the_request_names(api: Api) -> None:
    talk = [user(words(51, 200))]
    done = api.http.post("/v1/cache/warm", json={"model": "claude-haiku-5", "messages": talk})
    assert done.json()["fed_tokens"] > 150
    ask(api, "small", talk)
    assert newest(api)["cached_tokens"] > 150
    ask(api, "large", talk)
    assert newest(api)["cached_tokens"] < 64


def test_sessions_of_every_model_are_removed_from_ram(api: Api) -> None:
    """Those of the default model and of others: the next request computes all of its prompt."""
    talk = [user(words(5, 300))]
    for remove in ("all", "one"):
        ask(api, "small", talk)
        until(lambda: newest(api)["session"] is not None, 10, lambda: str(newest(api)))
        session = newest(api)["session"]
        path = f"/v1/sessions/{session}" if remove == "one" else "/v1/cache"
        assert api.http.delete(path).status_code == 200
        ask(api, "small", talk)
        assert newest(api)["cached_tokens"] < 64, remove


def test_a_file_of_mlx_lm_is_compared_only_with_weights_in_memory(api: Api) -> None:
    ask(api, "large", [user(words(6, 100))])
    found = api.http.get("/v1/sessions?limit=1").json()["data"][0]
    file = api.http.get(f"/v1/sessions/{found['id']}/snapshot?format=mlx-lm").content
    assert api.http.post("/v1/models/large/unload").status_code == 200
    refused = api.http.post("/v1/sessions", content=file)
    assert refused.status_code == 503, refused.text
    assert "models load large" in refused.text
    api.http.post("/v1/models/large/load")
    until(lambda: states(api)["large"] == "loaded", 10, lambda: str(states(api)))
    assert api.http.post("/v1/sessions", content=file).status_code == 201
    refused = api.http.post("/v1/sessions?model=small", content=file)
    assert refused.status_code == 400
    assert "not a complete snapshot" not in refused.text


@pytest.fixture(scope="module")
def adapted(toy: ToyMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """A base and two adapters over it, with memory for the base once."""
    home, base = tmp_path_factory.mktemp("adapted"), toy("llama", intermediate=10_000)
    tables = [f'[models.base]\npath = "{base}"\n']
    for seed, name in enumerate(("coder", "writer")):
        adapter = make_adapter(base, home / name, seed=seed)
        tables.append(f'[models.{name}]\npath = "{base}"\nadapter = "{adapter}"\n')
    file = home / "config.toml"
    file.write_text("\n".join(tables))
    with served("--config", str(file), "--ram", "400MB", home=home) as server:
        yield Api(server)


def test_adapters_over_one_base_hold_it_once(adapted: Api) -> None:
    """Each keeps a conversation of its own, and unloading any of them leaves the others."""
    api, names = adapted, ("base", "coder", "writer")
    talk = [user(words(5, 100))]

    def reply(name: str) -> str:
        said: str = ask(api, name, talk)["choices"][0]["message"]["content"]
        return said

    replies = {}
    for name in names:
        replies[name] = reply(name)
        assert newest(api)["cached_tokens"] == 0, name
    assert len(set(replies.values())) == 3
    figures = api.http.get("/v1/cache").json()
    models = {one["label"]: one for one in figures["models"]}
    kinds = {k: n for k, n in figures["memory"]["kinds"].items() if k.startswith("weights:")}
    shared = kinds.pop("weights:toy (shared)")
    assert {one["shared_bytes"] for one in models.values()} == {shared}
    assert shared > 5 * sum(kinds.values()) > 0
    for name in (*names, *reversed(names)):
        assert api.http.post(f"/v1/models/{name}/unload").status_code == 200
        assert {reply(other) for other in names if other != name} == {
            replies[other] for other in names if other != name
        }
        assert reply(name) == replies[name]
        memory = api.http.get("/v1/cache").json()["memory"]
        assert memory["kinds"]["weights:toy (shared)"] == shared
        assert memory["used_bytes"] <= memory["limit_bytes"]
    for name in names:
        api.http.post(f"/v1/models/{name}/unload")
    kinds = api.http.get("/v1/cache").json()["memory"]["kinds"]
    assert not any(n for kind, n in kinds.items() if kind.startswith("weights:"))
