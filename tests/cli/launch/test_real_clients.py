"""`mlxcache launch` with the real clients that are installed, each in a home folder of its own.

They are looked for on the PATH, and before that in the npm folder that `MLXCACHE_CLIENTS` names,
which also has the environments of those in Python.
Then they also renew their versions and figures in the table of docs/clients.md:

    npm install --prefix FOLDER node@22 @anthropic-ai/claude-code@latest opencode-ai@latest \\
        @openai/codex@latest @qwen-code/qwen-code@latest @earendil-works/pi-coding-agent@latest \\
        cline@latest @github/copilot@latest @continuedev/cli@latest
    python3 -m venv FOLDER/aider && FOLDER/aider/bin/pip install aider-chat
    python3 -m venv FOLDER/llm && FOLDER/llm/bin/pip install llm
    MLXCACHE_CLIENTS=FOLDER bin/test -m slow -s tests/cli/launch/test_real_clients.py
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mlxcache.cli.launch.clients import ANY_MODEL, CLIENTS, ClientName
from mlxcache.wire.chat_bodies import request_to_chat
from tests.conftest import ToyMaker
from tests.scripted import Line, reply_to, scripted
from tests.server.api import Api, until
from tests.server.recording import SPARE, check_turn

FOLDER = "MLXCACHE_CLIENTS"
PAGE = Path(__file__).parents[3] / "docs" / "clients.md"
SECONDS = 1500
TURN_SECONDS = 300
MODEL: dict[str, Any] = {
    "vocab_size": 16384, "hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 16,
    "context": 131072,
}  # fmt: skip
"""Long prompts, few weights."""


# -- the clients -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agent:
    """A client and its arguments.

    `opening` come before the first prompt of a conversation, `further` before each other one; None
    if it keeps running in a terminal, where those are typed. `shell` is its tool for shell
    commands, `argument` that tool's argument with the command, `others` its other arguments.
    `written` is the file that it writes in the task, seen from the folder of the project.
    """

    name: str
    opening: tuple[str, ...]
    further: tuple[str, ...] | None
    shell: str
    argument: str = "command"
    others: Mapping[str, Any] = field(default_factory=dict)
    written: str = "animal.txt"

    def call(self, command: str) -> str:
        """A call of the shell, as the model writes it."""
        value = [command] if self.argument == "commands" else command
        arguments = {self.argument: value, **self.others}
        written = json.dumps({"name": self.shell, "arguments": arguments})
        return f"<tool_call>\n{written}\n</tool_call>"


_CODEX = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_QWEN = ("--approval-mode=yolo",)
_QWEN_SHELL = {"description": "Look at the project", "is_background": False}
_COPILOT = ("--allow-all-tools",)
_DESCRIBED = {"description": "Look at the project"}

AGENTS = (
    Agent(
        "claude",
        ("--allowedTools=Bash", "-p"),
        ("--allowedTools=Bash", "--continue", "-p"),
        "Bash",
        others=_DESCRIBED,
    ),
    Agent("opencode", ("run",), ("run", "-c"), "bash", others=_DESCRIBED),
    Agent("codex", ("exec", *_CODEX), ("exec", "resume", "--last", *_CODEX), "exec_command", "cmd"),
    Agent(
        "qwen",
        (*_QWEN, "-p"),
        (*_QWEN, "-c", "-p"),
        "run_shell_command",
        others=_QWEN_SHELL,
        written="../animal.txt",  # with -c it lists the files of the project anew
    ),
    Agent("qwen", (*_QWEN, "-i"), None, "run_shell_command", others=_QWEN_SHELL),
    Agent("pi", ("-p",), ("-c", "-p"), "bash"),
    Agent("cline", ("-i",), None, "run_commands", "commands"),
    Agent(
        "cn",
        ("--auto", "-p"),
        ("--auto", "--resume", "-p"),
        "Bash",
        written="../animal.txt",  # with --resume it reads the Git status anew
    ),
    Agent("copilot", (*_COPILOT, "-p"), (*_COPILOT, "--continue", "-p"), "bash", others=_DESCRIBED),
)


@dataclass(frozen=True)
class Talker:
    """A client that `launch` lacks, without a shell: it reads prompts line by line, then `leave`.

    A turn feeds at most `spare` tokens more than what is new.
    """

    name: str
    words: tuple[str, ...]
    leave: str
    spare: int = SPARE


_AIDER = ("--model", "openai/current-model", "--no-fancy-input", "--yes-always", "--no-analytics")
_OFFLINE = ("--no-check-update", "--no-show-model-warnings")

TALKERS = (
    # about 230: its rules for edits, which follow the newest message, and the last reply
    Talker("aider", (*_AIDER, *_OFFLINE), "/exit", spare=240),
    Talker("llm", ("chat", "-m", "local", "-T", "llm_time"), "exit"),
)


def check_installed(name: str) -> None:
    if shutil.which(name, path=_path()) is None:
        pytest.skip(f"{name} is neither on the PATH nor in the folder {FOLDER}")


def _path() -> str:
    folder = os.environ.get(FOLDER)
    bins = ("node_modules/.bin", "aider/bin", "llm/bin")
    own = [str(Path(folder, one)) for one in bins] if folder else []
    return os.pathsep.join([*own, os.environ["PATH"]])


def environment(folder: Path) -> dict[str, str]:
    """No settings of the user's, and an empty home folder in `folder`."""
    others = (
        "AIDER_",
        "ANTHROPIC_",
        "CLAUDE",
        "CLINE_",
        "CODEX",
        "CONTINUE_",
        "COPILOT_",
        "LLM_",
        "OPENAI_",
        "OPENCODE",
        "PI_",
        "QWEN_",
    )
    dropped = (*others, "MLXCACHE_", "XDG_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    home = folder / "home"
    home.mkdir(exist_ok=True)
    own = {"HOME": str(home), "PATH": _path(), "TERM": "xterm-256color"}
    return kept | own | {"MLXCACHE_CACHE_DIR": str(folder / "cache")}


def launch(name: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "mlxcache.cli.main", "launch", name, *words]


# -- one prompt, no server ---------------------------------------------------------------------

FIRST = {agent.name: agent for agent in reversed(AGENTS)}
SINGLE = {agent.name: agent.opening for agent in AGENTS if agent.further}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SINGLE))
def test_a_real_client_completes_a_prompt(name: str, toy: ToyMaker, tmp_path: Path) -> None:
    """The command starts the server too, and the client prints the model's reply."""
    check_installed(name)
    # a model that ends its turns
    model = toy("llama", **MODEL | {"vocab_size": 8192}, emits={"<|im_end|>": 30})
    project = tmp_path / "home"
    flags = ["--model", str(model), "--ram", "500MB", "--port", "0", "--stop-after"]
    done = subprocess.run(
        launch(name, *flags, "--api-key", "a key", "--", *SINGLE[name], "hello"),
        env=environment(tmp_path) | {"MLXCACHE_DISK": "off"},
        cwd=project,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "keeps running" not in done.stderr
    log = next((tmp_path / "cache" / "log").iterdir()).read_text()
    prompts = re.findall(r"prompt (\d+) .*  stop", log)
    assert max(map(int, prompts)) > 1000, log


# -- a task of five turns ----------------------------------------------------------------------

TURNS = (
    ("Please read notes.txt and count its words.", 3, "It has eight words."),
    ("Which animal is it about?", 1, "It is about the quokka."),
    ("Please write that word to animal.txt.", 2, "The file is written."),
    ("When does it sleep?", 1, "It sleeps at night."),
    ("That is all, thank you.", 1, "You are welcome."),
)
"""Prompts, each with the requests of its turn, and with the reply that ends it."""

ANYTHING_ELSE: Line = ("", "Fine, that is done.")
"""For titles, and for the client's other agents."""


def script(agent: Agent) -> list[Line]:
    """Replies to the prompts and to the results of three calls of the shell."""
    ends = {prompt: reply for prompt, _, reply in TURNS}
    first, second, third, fourth, last = ends
    return [
        (re.escape(first), agent.call("cat notes.txt; echo step-1")),
        ("step-1", agent.call("wc -w notes.txt; echo step-2")),
        ("step-2", ends[first]),
        (re.escape(second), ends[second]),
        (re.escape(third), agent.call(f"echo quokka > {agent.written}; echo step-3")),
        ("step-3", ends[third]),
        (re.escape(fourth), ends[fourth]),
        (re.escape(last), ends[last]),
        ANYTHING_ELSE,
    ]


class Task:
    """The five turns of a client with a server that plays `script`."""

    def __init__(self, agent: Agent, api: Api, folder: Path):
        self._agent = agent
        self._api = api
        self._recorded = folder / "recorded"
        self.project = _make_project(folder / "project")
        self._environ = environment(folder)
        self._ours: dict[str, bool] = {}

    def run(self) -> None:
        """Send all prompts, each when the turn before is over."""
        if self._agent.further is None:
            self._type()
            return
        for number, (prompt, _, reply) in enumerate(TURNS):
            words = self._agent.further if number else self._agent.opening
            assert reply in self.say(*words, prompt)
            self._wait(number)

    def say(self, *words: str) -> str:
        """What the client prints when it runs once."""
        with self.started(*words) as client:
            said, errors = client.communicate(timeout=SECONDS)
            assert client.returncode == 0, errors
            return said

    @contextmanager
    def started(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """The client, with all that it started, until the end of the block."""
        client = subprocess.Popen(
            self._command(*words),
            env=self._environ,
            cwd=self.project,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield client
        finally:
            with suppress(ProcessLookupError):
                os.killpg(client.pid, signal.SIGKILL)
            client.wait()

    def _type(self) -> None:
        """In one terminal, in which the client keeps running."""
        opening = self._command(*self._agent.opening, TURNS[0][0])
        with terminal(opening, self._environ, self.project) as keys:
            self._wait(0)
            for number, (prompt, _, _) in enumerate(TURNS[1:], 1):
                time.sleep(3)  # it shows the reply, and takes keys again
                for key in f" {prompt}".encode():  # Cline drops what comes with its first key
                    os.write(keys, bytes([key]))
                    time.sleep(0.05)
                time.sleep(1)  # else the client takes the text and the key for one paste
                os.write(keys, b"\r")
                self._wait(number)

    def _command(self, *words: str) -> list[str]:
        return launch(self._agent.name, "--", *words)

    def _wait(self, number: int) -> None:
        """Until the requests of this turn are over."""
        count = sum(requests for _, requests, _ in TURNS[: number + 1])
        until(
            lambda: len(self.requests()) >= count,
            TURN_SECONDS,
            lambda: f"{len(self.requests())} of {count} requests",
            every=0.3,
        )

    def requests(self) -> list[dict[str, Any]]:
        """The finished requests of the conversation, oldest first: no titles or other agents."""
        found = self._api.http.get("/v1/requests").json()["data"][::-1]
        return [one for one in found if one["status"] == "done" and self._is_ours(one["id"])]

    def _is_ours(self, id: str) -> bool:
        if id not in self._ours:
            (body,) = self._recorded.glob(f"*{id}.json")
            chat = request_to_chat(json.loads(body.read_text(encoding="utf-8")))
            reply = reply_to(script(self._agent), chat.messages)
            self._ours[id] = bool(chat.tools) and reply != ANYTHING_ELSE[1]
        return self._ours[id]


def _make_project(folder: Path) -> Path:
    """A Git repository with one file and one commit."""
    folder.mkdir()
    (folder / "notes.txt").write_text("The quokka eats leaves and sleeps at night.\n")
    identity = ("-c", "user.name=A", "-c", "user.email=a@localhost")
    for words in (("init", "-q"), ("add", "."), (*identity, "commit", "-qm", "First")):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


@contextmanager
def terminal(command: Sequence[str], environ: Mapping[str, str], folder: Path) -> Iterator[int]:
    """Run a program in a terminal of 40 lines of 120 characters; yield where its keys go."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        command, stdin=its, stdout=its, stderr=its, env=environ, cwd=folder, start_new_session=True
    )
    os.close(its)
    threading.Thread(target=_drain, args=(ours,), daemon=True).start()
    try:
        yield ours
        assert process.poll() is None, "the client keeps running"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # Qwen Code is three processes
        process.wait()


def _drain(terminal: int) -> None:
    """Read what the program draws, until it ends."""
    try:
        while os.read(terminal, 1 << 16):
            pass
    except OSError:  # Linux: the last program in the terminal has ended
        return


def renew_row(name: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Write version, and tokens fed by the first request and the second turn, into the page."""
    title = CLIENTS[ClientName(name)].title if name in set(ClientName) else name
    command = [name, "--version"]
    environ = os.environ | {"PATH": _path()}
    said = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    (version,) = re.findall(r"\d+(?:\.\d+)+", said)[:1]
    fed = " | ".join(f"{one['fed_tokens']:,}" for one in (first, second))
    row = rf"^\| {title} \|[^|]+(\|.*?\|.*?\|)[^|]+\|[^|]+\|"
    new = rf"| {title} | {version} \g<1> {fed} |"
    page, count = re.subn(row, new, PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert count == 1
    PAGE.write_text(page, encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS, ids=lambda a: a.name if a.further else f"{a.name} tty")
def test_each_turn_of_a_task_feeds_what_is_new_in_it(
    agent: Agent, toy: ToyMaker, tmp_path: Path
) -> None:
    """Eight requests with three calls of the shell: at most 64 tokens more than what is new."""
    check_installed(agent.name)
    flags = ("--model", str(toy("llama", **MODEL)), "--ram", "1GB")
    folders = ("--cache-dir", str(tmp_path / "cache"), "--record", str(tmp_path / "recorded"))
    with scripted(script(agent), *flags, *folders, home=tmp_path) as server:
        task = Task(agent, Api(server), tmp_path)
        task.run()
        done = task.requests()
    rows = (f"{one['client']}: {one['fed_tokens']} of {one['prompt_tokens']}" for one in done)
    print("", *rows, sep="\n")
    assert (task.project / agent.written).read_text() == "quokka\n"
    assert len({one["session"] for one in done}) == 1
    for before, now in pairwise(done):
        check_turn(before, now)
    if FOLDER in os.environ and agent is FIRST[agent.name]:
        renew_row(agent.name, done[0], done[TURNS[0][1]])


@pytest.mark.slow
@pytest.mark.parametrize("talker", TALKERS, ids=lambda one: one.name)
def test_each_turn_of_a_talk_feeds_what_is_new_in_it(
    talker: Talker, toy: ToyMaker, tmp_path: Path
) -> None:
    """The turns of the task that need no shell, with the settings of docs/clients.md."""
    check_installed(talker.name)
    says = {prompt: reply for prompt, requests, reply in TURNS if requests == 1}
    lines = [(re.escape(prompt), reply) for prompt, reply in says.items()]
    flags = ("--model", str(toy("llama", **MODEL)), "--ram", "1GB")
    with scripted(lines, *flags, "--cache-dir", str(tmp_path / "cache"), home=tmp_path) as server:
        v1 = f"{server.url}/v1"
        model = {"model_id": "local", "model_name": ANY_MODEL, "api_base": v1}
        told = json.dumps([model | {"supports_tools": True}])  # YAML too
        (tmp_path / "extra-openai-models.yaml").write_text(told, encoding="utf-8")
        own = {"OPENAI_API_BASE": v1, "OPENAI_API_KEY": "local", "LLM_USER_PATH": str(tmp_path)}
        said = subprocess.run(
            [shutil.which(talker.name, path=_path()) or "", *talker.words],
            env=environment(tmp_path) | own,
            cwd=_make_project(tmp_path / "project"),
            input="\n".join([*says, talker.leave, ""]),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        ).stdout
        done = Api(server).http.get("/v1/requests").json()["data"][::-1]
    rows = (f"{one['client']}: {one['fed_tokens']} of {one['prompt_tokens']}" for one in done)
    print("", *rows, sep="\n")
    assert all(reply in said for reply in says.values())
    assert len(done) == len(says)
    assert len({one["session"] for one in done}) == 1
    for before, now in pairwise(done):
        check_turn(before, now, talker.spare)
    if FOLDER in os.environ:
        renew_row(talker.name, done[0], done[1])


@pytest.mark.slow
def test_claude_code_goes_on_after_a_kill_and_after_a_compaction(
    toy: ToyMaker, tmp_path: Path
) -> None:
    """What a killed first turn computed is reused, and after /compact the system prompt is."""
    check_installed("claude")
    agent = FIRST["claude"]
    assert agent.further
    lines = [("Respond with TEXT ONLY", "<summary>\nIt is about the quokka.\n</summary>")]
    flags = ("--model", str(toy("llama", **MODEL)), "--ram", "1GB")
    folders = ("--cache-dir", str(tmp_path / "cache"), "--record", str(tmp_path / "recorded"))
    with scripted([*lines, *script(agent)], *flags, *folders, home=tmp_path) as server:
        api = Api(server)
        task = Task(agent, api, tmp_path)

        def requests() -> list[dict[str, Any]]:
            found = api.http.get("/v1/requests").json()["data"][::-1]
            return [one for one in found if one["prompt_tokens"] > 5000]

        with task.started(*agent.opening, TURNS[0][0]):
            until(lambda: bool(requests()), TURN_SECONDS, lambda: "no request", every=0.1)
            time.sleep(1)
        until(lambda: requests()[-1]["status"] in ("cancelled", "done"), 30, lambda: "it goes on")
        killed = requests()[-1]
        for words in (TURNS[1][0], "/compact", TURNS[3][0], TURNS[4][0]):
            task.say(*agent.further, words)
        further, compaction, after, last = requests()[-4:]
    rows = (
        f"{one['fed_tokens']} of {one['prompt_tokens']}" for one in (further, compaction, after)
    )
    print("", *rows, sep="\n")
    assert further["cached_tokens"] >= killed["fed_tokens"] - SPARE
    check_turn(further, compaction)
    assert after["cached_tokens"] > after["prompt_tokens"] / 2
    check_turn(after, last)
