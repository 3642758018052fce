"""`mlxcache top`: what it shows, that it fits the terminal, and how it ends."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.cells import cell_len
from rich.console import Console

from mlxcache.cli.top import MAX_RECENT, LiveState, render
from tests.cli.answering import answering
from tests.cli.conftest import call
from tests.served import default_signals

NOW = 1_795_264_000.0
SERVER = {"state": "ready", "version": "0.1.0", "model": {"id": "org/model"}, "stalled_s": 0}
CACHE = {
    "ram": {
        "used_bytes": 3_200_000_000,
        "limit_bytes": 12_000_000_000,
        "withheld_bytes": 0,
        "kinds": {"kv": 3_300_000_000, "pool": 700_000_000},
    },
    "disk": {
        "used_bytes": 8_100_000_000,
        "limit_bytes": 50_000_000_000,
        "files": 1234,
        "state": "ok",
    },
    "active_bytes": 100_000_000,
    "pending_bytes": 12_000_000,
    "requests": {"total": 57, "cold": 2, "warm": 54, "restored": 1},
    "tokens": {"prompt": 1_247_901, "cached": 1_204_112, "fed": 43_789},
    "saved": {"tokens": 1_204_112, "seconds": 1012.0},
    "pressure": {"level": "normal"},
}


def session(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": f"ses_{number:012d}",
        "label": f"label-{number}",
        "name": None,
        "title": "Find the bug in the parser of " + "nested brackets " * 5,
        "tokens": 18_500 + number,
        "ram_bytes": 37_888_000,
        "disk_bytes": 38_012_928,
        "tier": "both",
        "last_used_at": NOW - 60 * number,
        "figures": {"requests": 1, "generated_tokens": 7},
        **more,
    }


def request(number: int, phase: str | None = None, done: int = 0, **more: Any) -> dict[str, Any]:
    """A request as the server lists it: finished, or in `phase`."""
    progress = None
    if phase:
        total = None if phase == "decode" else 18_500
        rate = 41.5 if phase == "decode" else None
        progress = {
            "phase": phase,
            "done_tokens": done,
            "total_tokens": total,
            "tokens_per_s": rate,
        }
    return {
        "id": f"req_{number}",
        "session": f"label-{number}",
        "client": "claude-cli/2.1.329",
        "status": phase or "done",
        "created_at": NOW - 100 + number,
        "cached_tokens": 118_000,
        "restored_tokens": 14_000,
        "fed_tokens": 1_234,
        "generated_tokens": 321,
        "timing": {"first_token_s": 0.4321},
        "finish_reason": None if phase else "tool_calls",
        "error": None,
        "progress": progress,
        **more,
    }


def state(*rows: dict[str, Any], **parts: Any) -> LiveState:
    made = LiveState()
    made.apply("server", parts.get("server", SERVER), 0.0)
    made.apply("cache", parts.get("cache", CACHE), 0.0)
    made.apply("requests", {"data": list(rows)}, 0.0)
    made.apply("sessions", {"data": parts.get("sessions", [session(n) for n in range(3)])}, 0.0)
    return made


def lines(state: LiveState, width: int = 80, height: int | None = None) -> list[str]:
    console = Console(width=width, highlight=False, force_terminal=False)
    with console.capture() as captured:
        url = "http://127.0.0.1:8081"
        console.print(render(state, url, width=width, height=height, now=NOW), width=width)
    return [line.rstrip() for line in captured.get().splitlines()]


ROWS = [
    request(0, "queued"),
    request(1, "prefill", 9_000),
    request(2, "decode", 120),
    *(request(n) for n in range(3, 9)),
]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_the_output_fits_the_terminals_width(width):
    found = lines(state(*ROWS), width)
    assert max(map(cell_len, found)) <= width
    assert len([line for line in found if "ses_" in line]) == 0


@pytest.mark.parametrize("height", [10, 24, 40])
def test_the_output_fits_the_terminals_height(height):
    """Running requests come first."""
    found = lines(state(*ROWS, sessions=[session(n) for n in range(40)]), 80, height)
    assert len(found) <= max(height, 16)
    assert height < 24 or any("prefill" in line for line in found)


def test_budgets_and_totals_are_shown():
    text = "\n".join(lines(state(*ROWS)))
    assert "4 GB of 12 GB\n" in text
    assert "█ 3.2 GB cached, ▓ 100 MB in use, ▒ 700 MB reserved\n" in text
    assert "withheld" not in text
    assert "8.1 GB of 50 GB in 1,234 files, 12 MB pending" in text
    assert "57 requests: 2 cold, 54 warm, 1 restored; 96% reused, 16 min 52 s saved" in text


def test_guessed_tokens_are_shown() -> None:
    """Where a draft model or the conversation proposed any."""
    tokens = {"cached": 1_204_112, "fed": 43_789, "drafted": 1200, "accepted": 800}
    text = "\n".join(lines(state(*ROWS, cache=CACHE | {"tokens": tokens}), 120))
    assert "saved; 800 of 1,200 guessed tokens accepted" in text


GB = 1_000_000_000


def bar(cached: int = 0, aside: int = 0, given: int = 0) -> str:
    """The bar of a memory budget of 1,000 bytes, 20 cells wide."""
    kinds = {"kv": cached, "transient": aside // 2, "pending": aside - aside // 2}
    ram = {"used_bytes": cached, "withheld_bytes": given, "kinds": kinds | {"withheld": given}}
    figures = {"active_bytes": 0, "ram": ram | {"limit_bytes": 1000}}
    (line,) = (line for line in lines(state(cache=CACHE | figures)) if line.startswith("RAM"))
    return line.split()[1]


def test_the_memory_bar_has_every_part():
    """Cached, reserved and withheld bytes; the smallest part has a cell; excess fills the bar."""
    assert bar() == "·" * 20
    assert bar(500) == "█" * 10 + "·" * 10
    assert bar(500, 100, 200) == "█" * 10 + "▒▒××××" + "····"
    assert bar(1, 0, 1) == "█×" + "·" * 18
    assert bar(1500, 500) == "█" * 15 + "▒" * 5


def test_the_weights_of_several_models_are_a_part_of_their_own() -> None:
    """Their budget includes them; they are not reserved for computing."""
    kinds = {"weights": 5 * GB, "kv": 2 * GB, "transient": GB}
    ram = {"used_bytes": 2 * GB, "withheld_bytes": 0, "kinds": kinds, "limit_bytes": 10 * GB}
    found = lines(state(cache=CACHE | {"active_bytes": 0, "ram": ram}))
    assert any("#" * 10 + "█" * 4 + "▒" * 2 + "·" * 4 in line for line in found)
    assert any("# 5 GB weights, █ 2 GB cached" in line for line in found)
    assert any(line.endswith("▒ 1 GB reserved") for line in found)


def model(label: str, state: str, **more: Any) -> dict[str, Any]:
    return {"label": label, "aliases": [], "default": False, "state": state, **more}


MODELS = [
    model("large", "loaded", weights_bytes=6 * GB, kv_bytes=2 * GB),
    model("small", "loading", progress=0.4, weights_bytes=GB, kv_bytes=0),
    model("old", "unloaded", unloaded_for="memory", weights_bytes=3 * GB, kv_bytes=0),
    model("a-name-that-is-too-long-for-its-column", "never"),
]


@pytest.mark.parametrize("width", [80, 120])
def test_several_models_have_a_line_each(width: int) -> None:
    """Its share of the budget, its state, how far it is loaded, why it was unloaded."""
    sessions = [session(1, model="large", title="One"), session(2, model="small", title="Two")]
    rows = [request(1, "decode", 9, model="large"), request(2, model="small")]
    found = lines(state(*rows, cache=CACHE | {"models": MODELS}, sessions=sessions), width)
    assert found[0].endswith("  4 models")
    told = [" ".join(line.split()) for line in found[2:6]]
    assert told[0] == f"large {'#' * 10 + '█' * 3 + '·' * 7} loaded, 6 GB weights, 2 GB KV"
    assert told[1].endswith(f"##{'·' * 18} loading 40%, 1 GB weights")
    assert told[2] == f"old {'·' * 20} unloaded: another model needed the memory"
    assert told[3] == f"a-name-that-i… {'·' * 20} not loaded yet"
    assert max(map(cell_len, found)) <= width
    titles = [line.split()[:2] for line in found if line.startswith(("One", "Two"))]
    assert titles[-2:] == [["One", "large"], ["Two", "small"]]
    if width == 120:
        at = next(i for i, line in enumerate(found) if line.startswith("Recent requests"))
        assert found[at + 2].split()[1:3] == ["Two", "small"]


@pytest.mark.parametrize("height", [24, 40])
def test_the_lines_of_models_fit_the_terminals_height(height: int) -> None:
    rows = [{**one, "model": "large"} for one in ROWS]
    listed = [session(n, model="large") for n in range(40)]
    found = lines(state(*rows, cache=CACHE | {"models": MODELS}, sessions=listed), 80, height)
    assert len(found) <= height


def test_a_label_on_two_models_has_a_name_for_each() -> None:
    """As a conversation and its titles: a request shows the one of its model."""
    sessions = [
        session(1, label="agent", model="small", title="Its title"),
        session(2, label="agent", model="large", title="The talk"),
    ]
    rows = [request(n, session="agent", model=one) for n, one in ((1, "large"), (2, "small"))]
    found = lines(state(*rows, sessions=sessions))
    at = next(i for i, line in enumerate(found) if line.startswith("Recent requests"))
    assert [line.split()[1] for line in found[at + 2 : at + 4]] == ["Its", "The"]


@pytest.mark.parametrize("size", [6_900_000, 112_500_000, 108_300_000_000])
def test_the_parts_of_memory_are_one_line(size):
    ram = CACHE["ram"] | {"used_bytes": size, "kinds": {"all": 3 * size}}  # type: ignore[operator]
    cache = CACHE | {"ram": ram, "active_bytes": size}
    found = lines(state(cache=cache))
    (parts,) = (line for line in found if "cached, " in line)
    assert parts.endswith("reserved")
    assert found[found.index(parts) + 1].startswith("Disk")


def test_withheld_memory_is_shown():
    ram = CACHE["ram"] | {"withheld_bytes": 1_500_000_000}  # type: ignore[operator]
    pressure = {"level": "critical"}
    text = "\n".join(lines(state(cache=CACHE | {"ram": ram, "pressure": pressure})))
    assert "memory pressure: critical, × 1.5 GB withheld" in text
    text = "\n".join(lines(state(cache=CACHE | {"ram": ram})))
    assert "memory pressure is over, × 1.5 GB withheld" in text


def test_a_first_session_that_is_being_computed_is_shown():
    """Warming a prefix makes no session."""
    text = "\n".join(lines(state(request(1, "prefill", 9_000), sessions=[])))
    assert "The first session is being computed" in text
    assert "no sessions yet" not in text
    for rows in ([], [request(1, "prefill", 9_000, api="warm")], [request(1)]):
        assert "no sessions yet" in "\n".join(lines(state(*rows, sessions=[])))


def test_faults_are_shown():
    disk = CACHE["disk"] | {"state": "suspended"}  # type: ignore[operator]
    cache = CACHE | {"disk": disk, "pressure": {"level": "critical"}}
    text = "\n".join(lines(state(server=SERVER | {"stalled_s": 95}, cache=cache)))
    assert "one step has run for 95 s" in text
    assert "writes fail" in text
    assert "memory pressure: critical" in text
    assert "No request is running." in text
    off = CACHE | {"disk": {"used_bytes": 0, "limit_bytes": 0}}
    assert "Disk off" in " ".join("\n".join(lines(state(cache=off))).split())


def test_the_remote_is_shown():
    remote = {"state": "ok", "reason": None, "uploaded_bytes": 12_000_000, "downloaded_bytes": 0}
    text = "\n".join(lines(state(cache=CACHE | {"remote": remote})))
    assert "remote: 12 MB sent, 0 bytes received" in text
    remote |= {"state": "unavailable", "reason": "connection refused"}
    text = "\n".join(lines(state(cache=CACHE | {"remote": remote})))
    assert "remote unavailable: connection refused" in text


def test_running_requests_show_their_progress():
    """The wait, the prompt's progress, the reply's speed; the oldest first."""
    found = lines(state(*ROWS))
    at = found.index("Running requests")
    queued, prefill, decode = (" ".join(line.split()) for line in found[at + 2 : at + 5])
    assert "queued for 1 min 40 s" in queued
    assert "9,000 of 18,500" in prefill
    assert decode.endswith("decode 120 41.5")


def test_the_speed_of_a_prefill_is_measured_from_its_updates():
    """It is unknown before the second update; while decoding it is the server's figure."""
    made = state(request(1, "prefill", 1_000))
    assert made.speed(made.running()[0]) is None
    made.apply("requests", {"data": [request(1, "prefill", 5_000)]}, 2.0)
    assert made.speed(made.running()[0]) == 2000.0
    made.apply("requests", {"data": [request(1, "decode", 1)]}, 3.0)
    assert made.speed(made.running()[0]) == 41.5
    made.apply("requests", {"data": [request(1)]}, 4.0)
    assert made.running() == []
    assert len(made.recent()) == 1


def test_recent_requests_show_where_their_prompt_came_from():
    found = lines(state(*ROWS))
    at = next(i for i, line in enumerate(found) if line.startswith("Recent requests"))
    first = " ".join(found[at + 2].split())
    assert first.endswith("104,000 14,000 1,234 321 0.43 s tools")
    assert "claude-cli" in first  # its session is not listed yet
    named = " ".join(found[-4:])
    assert "Find the bug" in named


def test_a_request_has_the_name_of_its_own_session():
    """Found by label or by id; without either, or before its session is listed, of its client."""
    sessions = [
        session(1, title="One", label=None),
        session(2, title="Two", label=None),
        session(3, title="Three"),
        session(4, title="Older, of another model", label="label-3"),
    ]
    rows = [
        request(1, session=sessions[0]["id"]),
        request(2, session=sessions[1]["id"]),
        request(3, session="label-3"),
        request(4, session=None, client="aider/0.86"),
        request(5, session="ses_0123456789ab", client="llm/0.36"),
        request(6, "decode", 1, session=None, client="pi"),
    ]
    found = lines(state(*rows, sessions=sessions), 120)
    at = next(i for i, line in enumerate(found) if line.startswith("Recent requests"))
    names = [line.split()[1] for line in found[at + 2 : at + 7]]
    assert names == ["llm/0.36", "aider/0.86", "Three", "Two", "One"]
    assert found[next(i for i, x in enumerate(found) if x.startswith("Running")) + 2][:2] == "pi"


def test_names_begin_with_their_client_where_there_are_several():
    two = [
        session(1, title="One", client="claude-cli/2.1.330"),
        session(2, title="Two", client="codex_exec/0.169.0 (Linux)"),
    ]
    rows = [request(1, session="label-1"), request(2, session="label-2")]
    text = "\n".join(lines(state(*rows, sessions=two), 120))
    assert text.count("claude: One") == text.count("codex: Two") == 2
    assert "claude:" not in "\n".join(lines(state(*rows, sessions=two[:1]), 120))


def test_a_session_without_a_reply_is_marked() -> None:
    one = session(1, title="One", figures={"requests": 2, "generated_tokens": 0})
    assert "no reply yet: One" in "\n".join(lines(state(sessions=[one]), 120))


def test_the_number_of_kept_requests_is_limited():
    """Running requests are kept in addition."""
    made = state(*(request(n) for n in range(3 * MAX_RECENT)), request(999, "decode", 1))
    assert len(made.recent()) == MAX_RECENT
    assert made.recent()[0]["id"] == f"req_{3 * MAX_RECENT - 1}"
    assert len(made.running()) == 1


def test_titles_and_client_names_are_not_markup():
    made = state(
        request(1, session=None, client="[red]x[/red]"),
        sessions=[session(1, title="a [bold]b[/bold]")],
    )
    text = "\n".join(lines(made, 120))
    assert "[red]x[/red]" in text
    assert "a [bold]b[/bold]" in text


# -- the command -----------------------------------------------------------------------------


class Live:
    """A server that sends `events` and keeps the stream open until `stays` is set."""

    def __init__(self) -> None:
        listed = {"object": "list", "data": [session(1)]}
        requests = {"object": "list", "data": ROWS}
        self.events: list[tuple[str, Any]] = [
            *(("server", SERVER), ("cache", CACHE), ("requests", requests), ("sessions", listed))
        ]
        self.stays = threading.Event()
        self.key: str | None = None
        self.url = ""

    def answer(self, request: BaseHTTPRequestHandler) -> Any:
        if request.path == "/health":
            return {}
        if self.key not in (None, request.headers.get("Authorization", "")[7:]):
            request.send_error(401)
            return None
        assert request.path.startswith("/v1/live?parts=")
        request.send_response(200)
        request.end_headers()
        for name, body in self.events:
            request.wfile.write(f"event: {name}\ndata: {json.dumps(body)}\n\n".encode())
        request.wfile.write(b": ping\n\n")
        request.wfile.flush()
        self.stays.wait(60)
        return None


@pytest.fixture
def server() -> Iterator[Live]:
    made = Live()
    with answering(made.answer) as made.url:
        yield made
        made.stays.set()


@pytest.fixture
def url(server: Live) -> str:
    return server.url


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_with_once_it_prints_the_state_and_ends(url):
    for flags in (["--once"], []):
        output = call("top", *flags, "--url", url).output
        assert "org/model" in output
        assert "9,000 of 18,500" in output
        assert max(map(cell_len, output.splitlines())) <= 80


def test_json_has_every_part_that_the_server_sent(url):
    """The bodies are unchanged; requests are sorted."""
    found = json.loads(call("top", "--json", "--url", url).output)
    assert (found["server"], found["cache"]) == (SERVER, CACHE)
    assert [one["id"] for one in found["requests"]][:3] == ["req_0", "req_1", "req_2"]
    assert len(found["sessions"]) == 1


def test_a_server_that_loads_its_model_is_shown(server):
    """It has no sessions, and the command does not wait for them."""
    loading = SERVER | {"state": "loading", "model": None}
    server.events = [("server", loading), ("cache", {}), ("requests", {"data": []})]
    output = call("top", "--once", "--url", server.url).output
    assert "loading" in output
    assert "no model yet" in output


def test_no_server_a_wrong_key_and_a_wrong_interval_are_errors(server, url):
    nowhere = call("top", "--once", "--url", "http://127.0.0.1:9", status=1).output
    assert "start one there" in " ".join(nowhere.split())
    server.key = "swordfish-0003"
    assert "--api-key" in call("top", "--once", "--url", url, status=1).output
    assert call("top", "--once", "--url", url, "--api-key", "swordfish-0003")
    call("top", "--interval", "0", "--url", url, status=2)


def at_a_terminal(url: str, end: Callable[[subprocess.Popen[bytes]], None]) -> tuple[int, bytes]:
    """Run the command at a terminal until it shows a prompt; return its status and output."""
    ours, theirs = pty.openpty()
    environ = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    command = [sys.executable, "-m", "mlxcache.cli.main", "top", "--url", url, "--interval", "0.1"]
    with subprocess.Popen(
        command,
        stdout=theirs,
        stderr=theirs,
        env=environ,
        preexec_fn=default_signals,  # noqa: PLW1509 - it takes no lock
    ) as process:
        os.close(theirs)
        output = b""
        try:
            while b"9,000 of 18,500" not in output:
                output += os.read(ours, 65536)
            end(process)
            with suppress(OSError):  # Linux reports the end as an error
                while piece := os.read(ours, 65536):
                    output += piece
            return process.wait(60), output
        finally:
            process.kill()
            os.close(ours)


def test_ctrl_c_ends_it_and_restores_the_terminal(url):
    status, output = at_a_terminal(url, lambda process: process.send_signal(signal.SIGINT))
    assert status == 0
    assert output.count(b"\x1b[?1049h") == output.count(b"\x1b[?1049l") == 1
    assert output.rindex(b"\x1b[?25h") > output.rindex(b"\x1b[?25l")
    assert b"Traceback" not in output
    assert b"Aborted" not in output


def test_the_end_of_the_server_is_an_error(server):
    status, output = at_a_terminal(server.url, lambda _: server.stays.set())
    assert status == 1
    assert b"has ended" in output


def test_the_picture_in_the_pages_has_the_tables_of_today() -> None:
    """Their titles and columns; else run bin/dashboard-picture."""
    path = Path(__file__).parents[2] / "docs" / "images" / "top.svg"
    shown = {" ".join("".join(e.itertext()).split()) for e in ElementTree.parse(path).iter()}
    whole = " ".join(shown)
    printed = lines(state(request(1, "prefill", 5), request(2)), width=104)
    titles = [line for line in printed if line.startswith(("Running", "Recent", "Sessions"))]
    heads = [printed[printed.index(title) + 1] for title in titles]
    assert len(heads) == 3
    for words in (*titles, *" ".join(heads).split()):
        assert words in whole, words
