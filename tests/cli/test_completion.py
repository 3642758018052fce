"""Completion of session ids by a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxcache.store.database import NAME, list_session_names
from mlxcache.store.leaves import conversation_key_tokens
from mlxcache.store.sessions import Sessions, Turn
from tests.store.content import opened, tokens

CODE = "import sys; sys.argv[0] = 'mlxcache'; from mlxcache.cli.main import main; main()"


@pytest.fixture
def cache(tmp_path: Path) -> tuple[Path, list[str]]:
    """A cache folder and the ids of its sessions, the newest first."""
    ids = tokens(100)
    with opened(tmp_path / "store") as store:
        sessions = Sessions(store.database)
        key = conversation_key_tokens((), 90)
        made = [
            sessions.record_turn(
                Turn(store.namespace, "model", ids, 90, key, 0, at, label=title, title=title)
            )
            for at, title in ((1.0, "trees\x1b[2J and birds"), (2.0, "stones"))
        ]
    return tmp_path, made[::-1]


def complete(words: str, folder: Path) -> list[str]:
    """What bash is offered for the last of `words`."""
    variables = {
        "_MLXCACHE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "MLXCACHE_CACHE_DIR": str(folder),
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.stderr
    return done.stdout.split()


def test_a_shell_is_offered_all_sessions(cache):
    """For each command that takes one, the newest first, with their titles beside them."""
    folder, ids = cache
    for command in ("sessions show", "sessions rm", "snapshot"):
        assert complete(f"mlxcache {command} ", folder) == ids
    assert list_session_names(folder / "store") == [
        (ids[0], "stones"),
        (ids[1], "trees\x1b[2J and birds"),
    ]


def test_the_beginning_of_an_id_or_a_name_narrows_the_choice(cache):
    """A name is completed as itself; one with blanks or control characters is not."""
    folder, ids = cache
    assert complete(f"mlxcache sessions pin {ids[1][:9]}", folder) == [ids[1]]
    assert complete("mlxcache sessions pin sto", folder) == ["stones"]
    for typed in ("tre", "zzz"):
        assert complete(f"mlxcache sessions pin {typed}", folder) == []


def test_a_folder_without_a_readable_store_offers_nothing(tmp_path):
    """And makes none; an error would be printed into the line being typed."""
    assert complete("mlxcache sessions show ", tmp_path / "none") == []
    assert not (tmp_path / "none").exists()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / NAME).write_bytes(b"no database" * 100)
    assert complete("mlxcache sessions show ", tmp_path) == []


def test_the_models_of_the_file_are_offered(tmp_path, monkeypatch):
    """By name and alias, for each --model; a file with a mistake offers none."""
    file = tmp_path / "c.toml"
    file.write_text('[models.small]\npath = "p"\naliases = "tiny"\n[models.large]\npath = "q"\n')
    monkeypatch.setenv("MLXCACHE_CONFIG", str(file))
    assert complete("mlxcache serve --model large --model ", tmp_path) == ["small", "tiny", "large"]
    file.write_text("[models.small]")
    assert complete("mlxcache serve --model s", tmp_path) == []
