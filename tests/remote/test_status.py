"""How a remote is shown: metrics, top, doctor, and the commands that count and prune it."""

from __future__ import annotations

import json
import os
import time

import pytest
from typer.testing import CliRunner

from mlxcache.api.metrics import FAMILIES, arrange_figures
from mlxcache.cli.cache import app
from mlxcache.cli.doctor.network import examine_remote
from mlxcache.config import Settings
from mlxcache.config.remote import read_remote_url
from mlxcache.engine.figures import Figures
from mlxcache.remote.objects import open_configured, open_remote

EXCHANGE = {"waiting": 2, "fetched_tokens": 64}


def metrics(figures) -> dict[str, dict[tuple[str, ...], float]]:
    now = arrange_figures(Figures(remote=figures | {"exchange": EXCHANGE}))
    return {
        one.name: dict(one.iterate_samples(now))
        for one in FAMILIES
        if one.name.startswith("remote_")
    }


def test_the_metrics_are_those_of_the_remote(share):
    objects = open_remote(f"file://{share}")
    objects.put("v1/space/run/a", bytes(1 << 20))
    objects.get("v1/space/run/a")
    found = metrics(objects.figures())
    objects.close()
    assert all(found.values())
    assert found["remote_available"] == {(): 1}
    assert found["remote_waiting_uploads"] == {(): 2}
    assert found["remote_fetched_tokens"] == {(): 64}
    moved = found["remote_transferred_bytes"]
    assert moved[("up",)] == moved[("down",)] > 1 << 20
    gone = metrics(objects.figures() | {"state": "unavailable", "upload_bytes_per_s": None})
    assert gone["remote_available"] == gone["remote_writable"] == {(): 0}
    assert set(gone["remote_bytes_per_second"]) == {("down",)}
    limited = metrics(objects.figures() | {"state": "read-only"})
    assert (limited["remote_available"], limited["remote_writable"]) == ({(): 1}, {(): 0})


def test_the_doctor_writes_and_reads_an_object(share, tmp_path):
    key = tmp_path / "key"
    key.write_text("0a" * 32)
    key.chmod(0o600)
    url = read_remote_url(f"file://{share}")
    found = examine_remote(Settings(remote=url, remote_key_file=key))
    assert (found.status, "sealed" in found.value) == ("ok", True)
    assert not [one for one in share.rglob("*") if one.is_file()]
    assert examine_remote(Settings(remote=url)).status == "ok"
    open_configured(Settings(remote=url, remote_key_file=key)).close()
    found = examine_remote(Settings(remote=url))
    assert (found.status, "--remote-key-file" in found.value) == ("fail", True)
    away = read_remote_url(f"file://{tmp_path}/none")
    assert "mount the share" in examine_remote(Settings(remote=away)).value


def test_the_doctor_tells_why_a_remote_is_not_used(proxy, bucket):
    proxy.set("read-only")
    found = examine_remote(Settings(remote=read_remote_url(bucket)))
    assert (found.status, "403" in found.value) == ("warn", True)


def run(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == status, done.output
    return done.output


@pytest.fixture(params=["file", "s3"])
def remote(request, share):
    """URL of a remote with three objects, one of them old if in a folder."""
    url = f"file://{share}" if request.param == "file" else request.getfixturevalue("bucket")
    objects = open_remote(url)
    for name in ("v1/space/run/a", "v1/space/run/b", "v1/space/reply/c"):
        objects.put(name, bytes(1000))
    objects.close()
    if request.param == "file":
        old = time.time() - 40 * 86400
        os.utime(share / "v1/space/run/a", (old, old))
    return url


def test_a_remote_is_counted_and_pruned(remote):
    found = json.loads(run("--remote", remote, "stats", "--json"))
    assert (found["objects"], found["kinds"]["run"]["objects"]) == (3, 2)
    text = run("--remote", remote, "stats")
    assert "3 objects" in text
    assert "reply" in text
    old = 1 if remote.startswith("file") else 0
    pruned = json.loads(run("--remote", remote, "prune", "--older-than", "30d", "--json"))
    assert pruned["objects"] == old
    assert "Removed" in run("--remote", remote, "prune", "--older-than", "0.001s")
    objects = open_remote(remote)
    assert objects.list("v1", 9) == ["v1/mlxcache.json"]
    objects.close()


def test_pruning_follows_no_link_out_of_a_share(share, tmp_path):
    """Whoever writes to the share decides what is linked there. Its names are not shown either."""
    away = tmp_path / "away"
    away.mkdir()
    (away / "mine").write_bytes(b"x")
    url = f"file://{share}"
    objects = open_remote(url)
    objects.put("v1/space/run/a", bytes(1000))
    objects.close()
    (share / "v1/space/reply").symlink_to(away)
    (share / "v1/space/strange").mkdir()
    (share / "v1/space/strange/x").write_bytes(b"x")
    found = json.loads(run("--remote", url, "stats", "--json"))
    assert {kind: one["objects"] for kind, one in found["kinds"].items()} == {"run": 1, "other": 1}
    run("--remote", url, "prune", "--older-than", "0.001s")
    assert (away / "mine").exists()
    assert not (share / "v1/space/run/a").exists()


def test_objects_of_another_key_are_counted_apart(remote, tmp_path):
    key = tmp_path / "key"
    key.write_text("0a" * 32)
    key.chmod(0o600)
    found = json.loads(run("--remote", remote, "--remote-key-file", str(key), "stats", "--json"))
    assert found["kinds"] == {"other": {"objects": 3, "bytes": found["bytes"]}}


def test_wrong_options_are_told(remote, use_endpoint):
    assert "--older-than 30d" in run("--remote", remote, "prune", status=2)
    assert "--older-than" in run("--remote", remote, "prune", "--older-than", "x", status=2)
    assert "add --remote URL" in run("prune", "--older-than", "30d", status=2)
    assert "stats or prune" in run("--remote", remote, "clear", "--yes", status=2)
    use_endpoint("http://127.0.0.1:9")
    assert "refused" in run("--remote", "s3://bucket/x", "stats", status=1)
