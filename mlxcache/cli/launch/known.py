"""The clients that can be launched."""

from __future__ import annotations

import shutil
from enum import StrEnum
from pathlib import Path

from mlxcache.cli.launch import codex
from mlxcache.cli.launch.claude import anyclaude, claude
from mlxcache.cli.launch.client import Client
from mlxcache.cli.launch.opencode import opencode
from mlxcache.errors import MlxcacheError


class Name(StrEnum):
    """What a person types."""

    CLAUDE = "claude"
    OPENCODE = "opencode"
    CODEX = "codex"
    ANYCLAUDE = "anyclaude"


CLIENTS = {
    Name.CLAUDE: Client(
        "claude",
        "Claude Code",
        "npm install -g @anthropic-ai/claude-code",
        15_000,
        "the most tools, sub-agents, plans; wants a model that calls tools well",
        claude,
    ),
    Name.OPENCODE: Client(
        "opencode",
        "OpenCode",
        "npm install -g opencode-ai",
        8_000,
        "fewer tools and a short prompt: the first choice for small models and little memory",
        opencode,
    ),
    Name.CODEX: Client(
        "codex",
        "Codex",
        codex.INSTALL,
        8_000,
        f"a shell and a patch tool; up to version {codex.LAST_WITH_CHAT} alone",
        codex.codex,
    ),
    Name.ANYCLAUDE: Client(
        "anyclaude",
        "anyclaude",
        "git clone https://github.com/akaszubski/anyclaude-local && cd anyclaude-local && "
        "npm install && npm run install:global",
        15_000,
        "Claude Code through a proxy that shortens prompts, in its mode mlx-lm",
        anyclaude,
    ),
}


def program(client: Client, path: str | None = None) -> Path:
    """Where `client` is on `path`, by default the user's PATH. Raises MlxcacheError."""
    found = shutil.which(client.name, path=path)
    if found is None:
        raise MlxcacheError(
            f"{client.title} is not installed: there is no `{client.name}` on the PATH. "
            f"Install it with\n{client.install}"
        )
    return Path(found)
