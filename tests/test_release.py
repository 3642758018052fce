"""A release: version, changelog and tag agree, and the workflow publishes what it tested."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import mlxcache

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the script, a package of version 1.2.0, and its changelog."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "_release.py").write_bytes((ROOT / "bin" / "_release.py").read_bytes())
    (tmp_path / "mlxcache").mkdir()
    (tmp_path / "mlxcache" / "__init__.py").write_text('"""Words."""\n\n__version__ = "1.2.0"\n')
    log = "# Changelog\n\n## 1.2.0 (2026-11-30)\n\n### Added\n\n- New.\n\n"
    log += "## 1.1.0 (2026-10-01)\n\nOld.\n"
    (tmp_path / "CHANGELOG.md").write_text(log)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = str(folder / "bin" / "_release.py")
    command = [sys.executable, "-I", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_changelog_begins_with_the_version_of_the_package() -> None:
    """So that a version without a section never gets as far as a tag."""
    done = run(ROOT, f"v{mlxcache.__version__}")
    unreleased = f"still says '{mlxcache.__version__} (unreleased)'"
    assert done.returncode == 0 or unreleased in done.stderr, done.stderr


def test_the_notes_of_a_release_are_its_section(clone: Path) -> None:
    """Without the heading, and without the section of the version before."""
    done = run(clone, "v1.2.0", "dist/mlxcache-1.2.0-py3-none-any.whl", "mlxcache-1.2.0.tar.gz")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "### Added\n\n- New.\n"


@pytest.mark.parametrize(
    ("arguments", "old", "new", "reason"),
    [
        (["v1.2.1"], "", "", "the tag is v1.2.1, and mlxcache.__version__ is 1.2.0"),
        (["1.2.0"], "", "", "the tag is 1.2.0"),
        (["v1.2.0"], "2026-11-30", "unreleased", "still says '1.2.0 (unreleased)'"),
        (["v1.2.0"], "## 1.2.0 ", "## 1.3.0 ", "begins with 1.3.0, not with 1.2.0"),
        (["v1.2.0"], "(2026-11-30)", "soon", "is not '## VERSION (YYYY-MM-DD)'"),
        (["v1.2.0"], "### Added\n\n- New.\n", "", "says nothing about 1.2.0"),
        (["v1.2.0", "mlxcache-1.2.0.1-py3-none-any.whl"], "", "", "is not of version 1.2.0"),
    ],
)
def test_what_contradicts_the_tag_ends_the_release(
    clone: Path, arguments: list[str], old: str, new: str, reason: str
) -> None:
    """With status 1 and the contradiction; nothing is printed that could become notes."""
    log = clone / "CHANGELOG.md"
    log.write_text(log.read_text().replace(old, new))
    done = run(clone, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert reason in done.stderr


def workflow(name: str) -> dict[Any, Any]:
    found: dict[Any, Any] = yaml.safe_load((WORKFLOWS / name).read_text())
    return found


def behind(jobs: dict[str, Any], name: str) -> set[str]:
    """The names of all jobs that must have passed before a job begins."""
    needs = jobs[name].get("needs", [])
    names = {needs} if isinstance(needs, str) else set(needs)
    return names.union(*(behind(jobs, one) for one in names))


def test_nothing_is_published_that_was_not_checked_and_installed_from_the_wheel() -> None:
    """One build; only the last two jobs may write, and only for a tag."""
    jobs = workflow("release.yml")["jobs"]
    commands = {name: str(job.get("steps", "")) for name, job in jobs.items()}
    assert [name for name, text in commands.items() if "-m build" in text] == ["build"]
    tested = jobs["wheel"]["strategy"]["matrix"]["include"]
    assert {re.sub(r"[-.\d]+.*", "", one["os"]) for one in tested} == {"macos", "ubuntu"}
    writers = {name for name, job in jobs.items() if "write" in str(job.get("permissions", ""))}
    assert writers == {"publish", "release"}
    for name in writers:
        assert {"build", "check", "wheel", "formula"} <= behind(jobs, name)
        assert jobs[name]["if"] == "github.ref_type == 'tag'"
        assert "actions/checkout" not in commands[name], "it handles files that other jobs made"
    assert workflow("release.yml")["permissions"] == {"contents": "read"}
    assert jobs["publish"]["permissions"].keys() == {"id-token", "attestations", "contents"}
    assert jobs["publish"]["permissions"]["contents"] == "read"
    assert "secrets." not in (WORKFLOWS / "release.yml").read_text()


def test_every_test_is_in_one_part_of_the_check() -> None:
    """So that a part ends in time on a hosted Mac."""
    parts = workflow("check.yml")["jobs"]["check"]["strategy"]["matrix"]["include"]
    named = [path for part in parts for path in part["tests"].split()]
    tests = ROOT / "tests"
    folders = {path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")}
    assert sorted(named) == sorted({f for f in folders if not f.endswith(".py")} | {"test_*.py"})


@pytest.mark.parametrize("name", sorted(path.name for path in WORKFLOWS.iterdir()))
def test_each_action_is_pinned_to_a_version(name: str) -> None:
    """And all workflows use the same one."""
    text = "".join(path.read_text() for path in WORKFLOWS.iterdir())
    for job in workflow(name)["jobs"].values():
        for step in job.get("steps", []):
            if action := step.get("uses"):
                base, _, pin = action.partition("@")
                assert re.fullmatch(r"v\d+|release/v\d+", pin), action
                assert set(re.findall(rf"{re.escape(base)}@(\S+)", text)) == {pin}


@pytest.mark.parametrize("name", sorted(path.name for path in WORKFLOWS.iterdir()))
def test_the_shell_of_each_step_parses_and_names_files_that_exist(name: str) -> None:
    """Expressions of GitHub are words of the shell there."""
    for job in workflow(name)["jobs"].values():
        for step in job.get("steps", []):
            code = re.sub(r"\$\{\{.*?\}\}", "WORD", step.get("run", ""))
            subprocess.run(["bash", "-n"], input=code, text=True, check=True)
            for path in re.findall(r"(?:^|\s)((?:bin|tests)/[\w./]+)", code):
                assert (ROOT / path).exists(), path
