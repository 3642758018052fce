"""`mlxcache doctor`: each check with good and bad input, and the whole command."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from mlxcache.cache.capacity import fit
from mlxcache.cli.doctor import Finding, clients, disk, machine, network, worst
from mlxcache.cli.doctor.command import Report, run_checks
from mlxcache.cli.doctor.machine import Host
from mlxcache.cli.doctor.models import Checked, examine_fit, examine_together, options
from mlxcache.config import Settings
from mlxcache.config.models import ModelEntry
from mlxcache.model.examine import Examined, examine
from mlxcache.model.load import ModelSpec
from tests.scheduling.heads import add_heads
from tests.served import served
from tests.toys.adapter import make_adapter

GB = 10**9
MAC = Host(
    system="Darwin",
    processor="arm64",
    chip="Apple M3 Max",
    macos="15.1",
    cores=16,
    gpu_cores=40,
    total=64 * GB,
    available=40 * GB,
    working_set=48 * GB,
    wired_mb=0,
    accelerated=True,
)


def test_the_overall_status_is_that_of_the_worst_finding() -> None:
    ok, warn, fail = Finding("", "ok", ""), Finding("", "warn", ""), Finding("", "fail", "")
    assert [worst([]), worst([ok, warn]), worst([warn, fail, ok])] == ["ok", "warn", "fail"]


def system(**more: Any) -> Finding:
    return machine.examine_system(replace(MAC, **more))


def memory(ram: int, weights: int) -> Finding:
    return machine.examine_memory(MAC, ram * GB, weights * GB, "for all")


def metal(needed: int, **more: Any) -> Finding | None:
    return machine.examine_metal(replace(MAC, **more), (needed - 1) * GB, GB)


@pytest.mark.parametrize(
    ("found", "status", "word"),
    [
        (system(), "ok", ""),
        (system(processor="x86_64"), "fail", "Rosetta"),
        (system(macos="14.6"), "warn", "macOS 15"),  # too old to keep weights wired
        (system(macos="13.7.8"), "fail", "macOS 14"),
        (system(macos="26.6.1"), "ok", ""),
        (system(system="Linux", macos="", processor="x86_64"), "ok", ""),
        (memory(10, 20), "ok", ""),
        (memory(20, 30), "warn", "--ram 7500MB"),
        (memory(40, 30), "fail", "--ram 25500MB"),
        (memory(5, 39), "warn", "the weights alone"),
        (memory(5, 70), "fail", "smaller model"),
        (metal(40), "ok", ""),
        (metal(50), "warn", "iogpu.wired_limit_mb=47684"),
        (metal(63), "warn", "fewer bits"),  # more than the machine has
        (metal(40, wired_mb=60000), "warn", "iogpu.wired_limit_mb=0"),
        (machine.examine_files(256), "warn", "ulimit"),  # that of a Mac's shells
        (machine.examine_files(4096), "ok", ""),
        (machine.examine_files(-1), "ok", ""),
    ],
)
def test_the_machine_is_checked(found: Finding | None, status: str, word: str) -> None:
    """Its system, memory, Metal's limit and open files, each with a remedy that fits."""
    assert found is not None
    assert found.status == status
    assert word in str(found.remedy)
    assert bool(found.remedy) == bool(word)


def test_without_metal_its_limit_is_not_checked() -> None:
    assert machine.examine_metal(replace(MAC, working_set=None), 1, 1) is None


def test_on_another_system_mlx_names_the_processor() -> None:
    here = machine.host(lambda _: None)
    assert here.chip
    assert (here.wired_mb, here.gpu_cores) == (None, None)
    assert 0 < here.available <= here.total


def test_versions_are_checked_against_the_required_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy for an old or missing package is the command that installs it."""
    assert machine.examine_versions().status == "ok"
    monkeypatch.setattr(machine, "requires", lambda _: ["mlx-lm>=99", "mlx>=0.1", "other>=99"])
    found = machine.examine_versions()
    assert (found.status, found.remedy) == ("fail", "pip install 'mlx-lm>=99'")

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(machine, "version", missing)
    assert "mlx missing" in machine.examine_versions().value


def test_on_linux_a_slow_blas_is_a_warning(tmp_path: Path) -> None:
    """The loaded libraries count, not the installed ones; other systems are not checked."""
    maps, linux = tmp_path / "maps", replace(MAC, system="Linux", accelerated=False)
    maps.write_text("7f r-xp 00 fe:00 7 /usr/lib/libopenblas.so.0\n7f r-xp 00 0 0\n")
    found = machine.examine_blas(linux, maps)
    assert found is not None
    assert (found.status, found.value) == ("ok", "libopenblas.so.0")
    numpy = "7f r-xp 00 fe:00 8 /venv/numpy.libs/libscipy_openblas64_-32a4b2a6.so\n"
    maps.write_text(f"7f r-xp 00 fe:00 7 /usr/lib/libblas.so.3\n{numpy}")
    found = machine.examine_blas(linux, maps)
    assert found is not None
    assert found.status == "warn", "MLX cannot use NumPy's own"
    assert "start with bin/serve" in str(found.remedy)
    found = machine.examine_blas(linux, maps, clone=tmp_path / "site-packages")
    assert found is not None
    assert str(found.remedy).endswith("start with LD_PRELOAD=libopenblas.so.0 mlxcache serve")
    assert machine.examine_blas(MAC, maps) is None


def test_the_cache_folder_must_be_writable_and_private(tmp_path: Path) -> None:
    """A missing folder is fine if it can be made; the check does not make it."""
    folder = tmp_path / "cache"
    assert disk.examine_folder(folder).status == "ok"
    assert not folder.exists()
    folder.mkdir(mode=0o700)
    assert disk.examine_folder(folder).status == "ok"
    folder.chmod(0o755)
    found = disk.examine_folder(folder)
    assert (found.status, "chmod 700" in str(found.remedy)) == ("warn", True)
    file = tmp_path / "file"
    file.write_text("")
    assert disk.examine_folder(file / "below").status == "fail"


def test_a_cache_folder_on_a_share_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "network_type", lambda folder: "smbfs")
    found = disk.examine_folder(tmp_path)
    assert (found.status, "--remote" in str(found.remedy)) == ("fail", True)
    assert "smbfs" in found.value


def test_free_disk_space_is_compared_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is that of --disk; a nearly full disk is a warning."""
    found = disk.examine_room(tmp_path, "50GB")
    assert found.figures["disk_bytes"] == 50 * GB
    assert "off" in disk.examine_room(tmp_path, "off").value
    monkeypatch.setattr(disk, "LEAST_FREE", 10**18)
    assert disk.examine_room(tmp_path, "50GB").status == "warn"


def test_measuring_the_disk_leaves_no_files(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    folder = tmp_path / "not" / "there"
    found = disk.examine_speed(folder, lambda *step: steps.append(step), 16 << 20)
    assert found.figures["write_bytes_s"] > 0
    assert steps[-1] == (32 << 20, 32 << 20)
    assert not folder.exists()
    tmp_path.joinpath("kept").mkdir()
    disk.examine_speed(tmp_path / "kept", lambda *_: None, 8 << 20)
    assert list((tmp_path / "kept").iterdir()) == []


def test_a_slow_disk_is_a_warning_and_a_failing_disk_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "SLOW", 10**18)
    assert disk.examine_speed(tmp_path, lambda *_: None, 8 << 20).status == "warn"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "sync", full)
    found = disk.examine_speed(tmp_path, lambda *_: None, 8 << 20)
    assert (found.status, "No space left" in found.value) == ("fail", True)
    assert list(tmp_path.iterdir()) == []


def settings_of(home: Path, env: object) -> None:
    home.joinpath(".claude").mkdir(exist_ok=True)
    home.joinpath(".claude", "settings.json").write_text(json.dumps({"env": env}))


URL = "http://127.0.0.1:8081"


def examined(
    home: Path,
    environ: dict[str, str],
    rules: dict[str, bool] | None = None,
    **programs: str,
) -> list[Finding]:
    return clients.examine_clients(environ, home, URL, rules or {}, which=programs.get, cwd=home)


def claude(
    home: Path, environ: dict[str, str], rules: dict[str, bool] | None = None, **programs: str
) -> dict[str, Finding]:
    found = examined(home, environ, rules, **programs)
    return {one.name.removeprefix("Claude Code, "): one for one in found}


def test_without_agents_there_are_no_findings(tmp_path: Path) -> None:
    assert claude(tmp_path, {}) == {}


@pytest.mark.parametrize(
    ("environ", "env", "status"),
    [
        ({}, {}, "warn"),
        ({"CLAUDE_CODE_ATTRIBUTION_HEADER": "0"}, {}, "ok"),
        ({}, {"CLAUDE_CODE_ATTRIBUTION_HEADER": "False"}, "ok"),
        ({}, {"CLAUDE_CODE_ATTRIBUTION_HEADER": 0}, "ok"),
        ({"CLAUDE_CODE_ATTRIBUTION_HEADER": "1"}, {}, "warn"),
        ({"CLAUDE_CODE_ATTRIBUTION_HEADER": ""}, {}, "warn"),
    ],
)
def test_claude_codes_attribution_must_be_off(
    environ: dict[str, str], env: dict[str, Any], status: str, tmp_path: Path
) -> None:
    settings_of(tmp_path, env)
    assert claude(tmp_path, environ)["attribution"].status == status


def test_text_that_canonicalisation_removes_is_no_warning(tmp_path: Path) -> None:
    settings_of(tmp_path, {})
    for name, rule in (("attribution", "attribution"), ("git status", "git_status")):
        assert claude(tmp_path, {}, {rule: True})[name].status == "ok"
        cold = claude(tmp_path, {}, {rule: False})[name]
        assert (cold.status, bool(cold.remedy)) == ("warn", True)


@pytest.mark.parametrize(
    ("printed", "status"), [("2.1.330 (Claude Code)", "ok"), ("2.1.197", "warn"), ("none", "warn")]
)
def test_a_git_status_outside_of_the_system_prompt_is_no_warning(
    printed: str, status: str, tmp_path: Path
) -> None:
    """The installed version tells where it is; an unknown one may have it at the start."""
    program = tmp_path / "claude"
    program.write_text(f"#!/bin/sh\necho '{printed}'\n")
    program.chmod(0o755)
    git = claude(tmp_path, {}, claude=str(program))["git status"]
    assert git.status == status
    assert bool(git.remedy) == (status == "warn")


def test_claude_codes_address_must_lack_v1_and_have_a_context(tmp_path: Path) -> None:
    settings_of(tmp_path, {})
    base = "ANTHROPIC_BASE_URL"
    assert "address" not in claude(tmp_path, {base: "https://api.example.com/v1"})
    assert claude(tmp_path, {base: "http://localhost:8081/v1"})["address"].status == "fail"
    assert claude(tmp_path, {base: URL})["address"].status == "warn"
    known = {base: URL, "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "32768"}
    assert claude(tmp_path, known)["address"].status == "ok"


@pytest.mark.parametrize("base", ["http://localhost:port/", "http://[", "http://127.0.0.1:99999"])
def test_an_invalid_address_is_not_this_servers(base: str, tmp_path: Path) -> None:
    """Settings of every client may contain any text, such as unexpanded variables."""
    assert "address" not in claude(tmp_path, {"ANTHROPIC_BASE_URL": base})
    (tmp_path / "opencode.json").write_text(
        json.dumps({"provider": {"m": {"options": {"baseURL": base}}}})
    )
    environ = {"ANYCLAUDE_MODE": "mlx-lm", "LOCAL_URL": f"{base}/v1"}
    found = examined(tmp_path, environ)
    assert ("anyclaude", "warn") in [(one.name, one.status) for one in found]
    assert not any(one.name.startswith("OpenCode") for one in found)


@pytest.mark.parametrize("text", ["{", "[]", '{"env": []}', "\udcff", "[" * 100_000])
def test_a_broken_settings_file_is_a_warning(text: str, tmp_path: Path) -> None:
    settings_of(tmp_path, {})
    file = tmp_path / ".claude" / "settings.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    (found,) = claude(tmp_path, {}).values()
    assert found.status == "warn"
    assert str(file) in found.value


@pytest.mark.parametrize(
    ("environ", "status"),
    [
        ({}, "warn"),
        ({"ANYCLAUDE_MODE": "openrouter"}, "warn"),
        ({"ANYCLAUDE_MODE": "mlx-lm"}, "warn"),
        ({"ANYCLAUDE_MODE": "mlx-lm", "LOCAL_URL": f"{URL}/v1"}, "ok"),
        ({"ANYCLAUDE_MODE": "mlx-lm", "MLX_LM_URL": URL}, "fail"),
        ({"ANYCLAUDE_MODE": "mlx-lm", "MLX_LM_URL": "http://127.0.0.1:1234/v1"}, "warn"),
    ],
)
def test_anyclaude_must_use_this_server(
    environ: dict[str, str], status: str, tmp_path: Path
) -> None:
    """It needs the mode for local servers and an address with /v1, in either variable."""
    (found,) = examined(tmp_path, environ, anyclaude="anyclaude")
    assert found.status == status


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_port_in_use_is_a_failure_that_names_the_program() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = network.examine_port(Settings(port=port))
        assert found.status == "fail"
        if sys.platform == "linux":  # on a Mac only root may list connections
            assert str(os.getpid()) in found.value
    assert network.examine_port(Settings(port=free_port())).status == "ok"
    assert network.examine_port(Settings(port=0)).status == "ok"


def doctor(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a new process, with `home` as its home."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MLXCACHE_", "XDG_"))}
    environ = kept | {"HOME": str(home), "NO_COLOR": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "mlxcache.cli.main", "doctor", *arguments]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, env=environ, timeout=120
    )


def widest(output: str) -> int:
    """Width of the longest line, remedies apart."""
    remedy = re.compile(r" {6}\S")
    return max(len(line) for line in output.splitlines() if not remedy.match(line))


def test_the_command_fits_80_columns_and_writes_no_file(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--quick", "--port", str(free_port()))
    assert done.returncode == 0, done.stdout + done.stderr
    assert widest(done.stdout) <= 80
    for name in ("versions", "machine", "memory", "cache folder", "port", "server"):
        assert name in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_running_server_and_a_wrong_file_are_found_and_a_failure_is_status_1(
    toy: Any, tmp_path: Path
) -> None:
    with served("--model", str(toy("llama")), home=tmp_path) as server:
        port = server.url.rpartition(":")[2]
        config = tmp_path / "wrong.toml"
        config.write_text("prot = 1")
        given = ("--port", port, "--model", "/absent", "--config", str(config))
        done = doctor(tmp_path, "--quick", "--json", *given)
    found = json.loads(done.stdout)
    by_name = {one["name"]: one for one in found["findings"]}
    assert "did you mean port?" in by_name["settings"]["value"]
    assert "mlxcache serves there" in by_name["port"]["value"]
    assert server.url in by_name["server"]["value"]
    assert (by_name["model"]["status"], "/absent" in by_name["model"]["value"]) == ("fail", True)
    assert (done.returncode, found["status"]) == (1, "fail")


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_a_model_is_shown_with_what_sessions_cost(
    family: str, toy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tables have the kinds of layers, both lengths and the options, within 80 columns."""
    settings = Settings(model=str(toy(family)), cache_dir=tmp_path, ram="1GB", disk="2GB")
    report = run_checks(settings, quick=True, shown=False)
    report.show()
    output = capsys.readouterr().out
    assert widest(output) <= 80
    kinds = {"llama": "to any token", "gemma3": "sliding window of 64", "qwen3_5": "recurrent"}
    assert kinds[family] in output
    found = report.as_object()["model"]
    assert [one["tokens"] for one in found["sessions"]] == [20_000, 65_536]
    per_token, (short, long) = found["bytes_per_token"], found["sessions"]
    assert (
        short["ram_bytes"]
        >= 20_000 * per_token + short["ram_checkpoints"] * (found["checkpoint_bytes"])
    )
    assert 2.5 < long["disk_bytes"] / short["disk_bytes"] < 4
    assert short["fit_ram"] == found["room_bytes"] // short["ram_bytes"]
    assert short["fit_disk"] == 2 * GB // short["disk_bytes"]
    assert found["draft_model"]["possible"] == (family != "qwen3_5")


def values(report: Report, name: str) -> list[str]:
    return [one.value for one in report.findings if one.name == name]


def test_heads_in_a_models_files_are_told(toy: Any, tmp_path: Path) -> None:
    """And whether they are used."""
    model = add_heads(toy("qwen3_5"), tmp_path / "toy")
    settings = Settings(model=str(model), cache_dir=tmp_path, ram="1GB", disk="off")
    for chosen, told in (
        (settings, "see --speculate auto"),
        (replace(settings, speculate="auto"), "draft tokens"),
    ):
        (value,) = values(run_checks(chosen, quick=True, shown=False), "heads")
        assert told in value
    assert not values(
        run_checks(replace(settings, model=str(toy("llama"))), quick=True, shown=False), "heads"
    )


def test_each_of_several_models_is_examined(
    toy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the settings of its own; what cannot be loaded fails, the others are shown."""
    base, damaged = toy("llama"), tmp_path / "damaged"
    shutil.copytree(toy("qwen3_5"), damaged)
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    adapter = make_adapter(base, tmp_path / "adapter")
    (adapter / "adapter_config.json").write_text(
        json.dumps(
            json.loads((adapter / "adapter_config.json").read_bytes()) | {"model": "org/another"}
        )
    )
    entries = (
        ModelEntry(str(base), name="own", context=4096),
        ModelEntry(str(base), name="tuned", adapter=str(adapter)),
        ModelEntry(str(damaged), name="broken"),
        ModelEntry("/absent", name="gone"),
    )
    settings = Settings(models=entries, cache_dir=tmp_path / "cache", ram="1GB", disk="2GB")
    report = run_checks(settings, quick=True, shown=False)
    assert [one.found.info.context_length for one in report.models] == [4096, 65536]
    failed = [one.value for one in report.findings if one.status == "fail"]
    assert [value.partition(":")[0] for value in failed] == ["broken", "gone"]
    assert "is damaged or incomplete. Copy or download the model again." in failed[0]
    assert values(report, "context")[0] == "own: all of the model's 4,096 tokens fit --ram"
    (wrong,) = values(report, "adapter")
    assert wrong.startswith("tuned: ")
    assert "was made for org/another" in wrong
    (memory,) = values(report, "memory")
    assert "--ram is 1 GB for all models and their weights" in memory
    (together,) = values(report, "together")
    assert together.startswith("all 2 models, ")
    report.show()
    output = capsys.readouterr().out
    assert widest(output) <= 80
    assert [line for line in output.splitlines() if line in ("own", "tuned")] == ["own", "tuned"]
    assert set(report.as_object()["models"]) == {"own", "tuned"}


@pytest.mark.parametrize(
    ("ram", "told"),
    [
        (80 * GB, "all 3 models, 32 GB of weights, fit --ram (80 GB) at once"),
        (40 * GB, "2 of 3 models fit --ram (40 GB) at once: big and tuned; big and small; tuned"),
        (
            18 * GB,
            "one model at a time fits --ram (18 GB): small. The others are",
        ),
        (4 * GB, "no model fits --ram (4 GB)"),
    ],
)
def test_models_that_fit_together_are_named(toy: Any, ram: int, told: str) -> None:
    found = examine(ModelSpec(str(toy("llama"))))
    models = []
    for name, path, size in (("big", "b", 20), ("tuned", "b", 20), ("small", "s", 12)):
        info = replace(found.info, weights_bytes=size * GB)
        fitted = fit(found.layout, ram=ram, disk=0, tokens=())
        models.append(Checked(ModelEntry(path, name=name), replace(found, info=info), fitted))
    assert told in examine_together(models, ram).value


def checked_of(found: Examined) -> tuple[dict[str, Any], str]:
    """The object of a model, and the text of its first finding."""
    fitted = fit(found.layout, ram=GB, disk=0, tokens=())
    said = examine_fit(found, fitted)[0].value
    return Checked(ModelEntry(None), found, fitted).as_object(), said


def test_the_library_that_runs_a_model_is_named(toy: Any) -> None:
    found = examine(ModelSpec(str(toy("llama"))))
    for backend in ("mlx-lm", "mlx-vlm"):
        checked, said = checked_of(replace(found, info=replace(found.info, backend=backend)))
        assert ("(llama, run by mlx-vlm)" in said) == (backend == "mlx-vlm")
        assert checked["backend"] == backend


@pytest.mark.parametrize("model", ["toy_llama", "toy_muse"])
def test_whether_a_model_takes_images_is_told(model: str, request: pytest.FixtureRequest) -> None:
    sees = model == "toy_muse"
    path = request.getfixturevalue(model)
    checked, said = checked_of(examine(ModelSpec(str(path), trust_remote_code=True)))
    assert (", takes images), " in said) == sees
    assert checked["images"] == sees


def test_why_images_are_not_fed_is_told(toy: Any) -> None:
    found = examine(ModelSpec(str(toy("llama"))))
    fitted = fit(found.layout, ram=GB, disk=0, tokens=())
    for unseen in (None, "they need mlx-vlm"):
        told = examine_fit(replace(found, unseen=unseen), fitted)
        assert [one.value for one in told if one.name == "images"] == (
            [f"not fed to this model: {unseen}"] if unseen else []
        )
    info = replace(found.info, backend="mlx-vlm")
    assert dict(options(replace(found, info=info)))["--kv-bits"] == "possible, but without images"
    assert dict(options(found))["--kv-bits"] == "possible"


def test_a_model_that_mlx_vlm_feeds_images_is_told(toy: Any) -> None:
    """With another setting it is a text model of mlx-lm."""
    path = str(toy("qwen3_vl", images=True))
    for images, said in (
        (True, "(qwen3_vl, run by mlx-vlm, takes images), "),
        (False, "(qwen3_vl), "),
    ):
        checked, told = checked_of(examine(ModelSpec(path, images=images)))
        assert said in told
        assert checked["images"] == images


@pytest.mark.parametrize("off", [False, True])
def test_the_models_sampling_defaults_are_shown(toy: Any, tmp_path: Path, off: bool) -> None:
    model = tmp_path / "model"
    shutil.copytree(toy("llama"), model)
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    settings = Settings(
        model=str(model), cache_dir=tmp_path, ram="1GB", disk="2GB", no_generation_config=off
    )
    findings = run_checks(settings, quick=True, shown=False).findings
    (found,) = (one.value for one in findings if one.name == "sampling")
    assert found.startswith("temperature 0.6, top_k 20, from the model's generation_config.json")
    assert ("not used: --no-generation-config" in found) == off


def test_only_the_settings_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other file of Claude Code's folder is opened: they may be secret."""
    settings_of(tmp_path, {})
    (tmp_path / ".claude" / "history.jsonl").write_text("{}")
    opened: list[Path] = []
    read = Path.read_bytes

    def noted(path: Path) -> bytes:
        opened.append(path)
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", noted)
    assert claude(tmp_path, {})["attribution"].status == "warn"
    opencode = tmp_path / ".config" / "opencode"
    others = {opencode / name for name in ("opencode.json", "opencode.jsonc")}
    others |= {tmp_path / name for name in ("opencode.json", "opencode.jsonc")}
    assert set(opened) - others == {tmp_path / ".claude" / "settings.json"}


@pytest.mark.parametrize(
    ("text", "rules", "status", "word"),
    [
        ('{"provider": {"m": {"options": {"baseURL": "%s"}}}}', {}, "fail", "/v1"),
        (
            '{"provider": {"m": {"options": {"baseURL": "%s/v1"}, "models": {"x": {}}}}}',
            {},
            "warn",
            "launch opencode",
        ),
        (
            """{
            // a comment, and "quotes" in it
            "provider": {"m": {"options": {"baseURL": "%s/v1"}, /* another */
              "models": {"x": {"limit": {"context": 9, "output": 1,},},},}},
            }""",
            {},
            "ok",
            None,
        ),
        ('{"compaction": {"prune": true}}', {}, "warn", "prune"),
        ("{", {}, "warn", "fix it"),
    ],
)
def test_opencodes_settings_must_have_the_address_and_the_context(
    text: str, rules: dict[str, bool], status: str, word: str | None, tmp_path: Path
) -> None:
    """Settings may have comments; other providers are not checked."""
    other = '{"provider": {"o": {"options": {"baseURL": "https://elsewhere"}}}}'
    folder = tmp_path / ".config" / "opencode"
    folder.mkdir(parents=True)
    (folder / "opencode.json").write_text(other)
    (folder / "opencode.jsonc").write_text(text.replace("%s", URL))
    found = examined(tmp_path, {}, rules)
    assert [one.status for one in found] == [status]
    assert word is None or word in str(found[0].remedy)
