"""`serve --hosts`: which machines, what is refused, and that no process outlives the others."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from mlxcache.cli import ranks
from mlxcache.cli.main import app
from mlxcache.config import Settings
from mlxcache.config.models import ModelEntry
from mlxcache.errors import ConfigError


def own_address() -> str:
    """An address of this machine besides that of loopback."""
    found = [
        one.address
        for each in psutil.net_if_addrs().values()
        for one in each
        if one.family.name == "AF_INET" and not one.address.startswith("127.")
    ]
    if not found:
        pytest.skip("this machine has no address but that of loopback")
    return found[0]


def test_the_first_host_is_started_without_ssh():
    """So it has this process's environment, API keys among it."""
    mine = own_address()
    hosts = ranks.read_hosts(f"{mine}, 192.0.2.7")
    assert hosts[0] == {"ssh": "127.0.0.1", "ips": [mine]}
    assert hosts[1] == {"ssh": "192.0.2.7", "ips": ["192.0.2.7"]}
    here = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}
    assert ranks.read_hosts("127.0.0.1,localhost") == [here, here]


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ("127.0.0.1", "two machines"),
        ("127.0.0.1,", "missing"),
        ("127.0.0.1,no-such-host.invalid", "no-such-host.invalid has no address"),
        ("192.0.2.7,127.0.0.1", "first must be this machine"),
    ],
)
def test_hosts_that_cannot_be_used_are_refused(hosts: str, words: str):
    with pytest.raises(ConfigError, match=words):
        ranks.read_hosts(hosts)


def test_each_machine_runs_the_same_command(tmp_path: Path):
    hostfile = tmp_path / "hosts.json"
    with pytest.raises(ConfigError, match=r"hosts\.json: there is no such file"):
        ranks.launch_command(hostfile, [])
    hostfile.write_text("[]")
    command = ranks.launch_command(hostfile, ["serve", "--model", "m"], 4000)
    assert Path(command[0]).name == "mlx.launch"
    assert command[1:6] == ["--hostfile", str(hostfile), "--starting-port", "4000", "--"]
    assert command[6:] == [sys.executable, "-m", "mlxcache.cli.main", "serve", "--model", "m"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(), "built-in demo"),
        (Settings(model="m", draft_model="d"), "--draft-model"),
        (Settings(model="m", idle_unload=60.0), "--idle-unload"),
        (Settings(models=(ModelEntry("a"), ModelEntry("b"))), "several models"),
        (Settings(model="m", hosts="a,b", hostfile=Path("f")), "set one of them"),
    ],
)
def test_what_several_machines_do_not_have_yet_is_refused(settings: Settings, words: str):
    with pytest.raises(ConfigError, match=words):
        settings.check_divisible()


def test_serve_refuses_before_it_starts_anything():
    result = CliRunner().invoke(app, ["serve", "--hosts", "127.0.0.1,127.0.0.1"])
    assert result.exit_code
    assert "built-in demo" in result.output


LAUNCHER = """
import json, os, signal, subprocess, sys
assert sys.stdin.readable()
sleep = "import signal, sys, time; signal.signal(2, lambda *a: sys.exit(0)); time.sleep(60)"
ranks = [
    subprocess.Popen([sys.executable, "-c", sleep], env=os.environ | {"MLX_RANK": str(i)})
    for i in range(2)
]
with open(sys.argv[1], "w") as file:
    json.dump([one.pid for one in ranks], file)
os.rename(sys.argv[1], sys.argv[1] + ".done")
for one in ranks:
    one.wait()  # for ever for a frozen one, like mlx.launch
"""


def lives(pid: int) -> bool:
    """Whether a process has not ended; where nobody asks for its status, an ended one is listed."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_two(folder: Path, disturb: dict[int, int]) -> tuple[int, float]:
    """Run two processes, and send signals to them by their rank; return status and seconds."""
    file = folder / "pids"
    done = folder / "pids.done"
    pids: list[int] = []
    began = [0.0]

    def send() -> None:
        while not done.exists():
            time.sleep(0.02)
        pids.extend(json.loads(done.read_text()))
        time.sleep(0.5)  # for the handlers of the signal, and for these processes to be seen
        began[0] = time.monotonic()
        for rank, number in disturb.items():
            psutil.Process(pids[rank]).send_signal(number)

    sender = threading.Thread(target=send)
    sender.start()
    status = ranks.Ranks([sys.executable, "-c", LAUNCHER, str(file)]).run()
    sender.join()
    assert not any(lives(pid) for pid in pids)
    return status, time.monotonic() - began[0]


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_process_does_not_outlive_the_others(tmp_path: Path, rank: int):
    """The launcher waits for it for ever; here it is killed, and the exit status says so."""
    signals = {rank: signal.SIGSTOP, 1 - rank: signal.SIGINT}
    status, seconds = run_two(tmp_path, dict(sorted(signals.items(), key=lambda x: x[1] == 2)))
    assert status == 1
    assert seconds < ranks.END_S + 3
