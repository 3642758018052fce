"""Check coding agents' settings for values that are known to break caching.

Reads `env` in Claude Code's settings.json and OpenCode's configuration files. Writes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packaging.version import Version

from mlxcache.cli.connect import (
    claude_env,
    claude_folder,
    current_folder,
    find_on_path,
    opencode_files,
    read_object,
)
from mlxcache.cli.doctor import Finding
from mlxcache.cli.launch.clients import CLIENTS, ClientName
from mlxcache.cli.launch.processes import version_output
from mlxcache.errors import MlxcacheError

ATTRIBUTION = "CLAUDE_CODE_ATTRIBUTION_HEADER"
GIT = "CLAUDE_CODE_DISABLE_GIT_INSTRUCTIONS"
CONTEXT = "CLAUDE_CODE_MAX_CONTEXT_TOKENS"

_OFF = ("0", "false", "no", "off")

_ADDRESSES = ("MLX_LM_URL", "LOCAL_URL")
_MODES = ("mlx-lm", "local")

_GIT_IN_MESSAGE = Version("2.1.330")
"""Version of Claude Code that was observed to put the git status into the first user message.

2.1.197 and older ones put it into the system prompt (docs/clients.md)."""

Which = Callable[[str], str | None]


def examine_clients(
    environ: Mapping[str, str],
    home: Path,
    url: str,
    rules: Mapping[str, bool],
    *,
    which: Which = find_on_path,
    cwd: Path | None = None,
) -> list[Finding]:
    """Check the settings of Claude Code, anyclaude and OpenCode, as far as they are found.

    `url` is the server's, and `rules` tells of each canonicalisation rule whether it is on. May run
    `claude --version`, and blocks for that.
    """
    found = []
    settings = claude_folder(environ, home) / "settings.json"
    program = which("claude")
    if settings.parent.is_dir() or program:
        found += _claude(environ, settings, url, rules, program)
    if which("anyclaude") or "ANYCLAUDE_MODE" in environ:
        found.append(_anyclaude(environ, url))
    for path in opencode_files(environ, home, cwd or current_folder()):
        found += _opencode(path, url, rules)
    return found


def _claude(
    environ: Mapping[str, str],
    settings: Path,
    url: str,
    rules: Mapping[str, bool],
    program: str | None,
) -> list[Finding]:
    try:
        own = claude_env(read_object(settings))
    except ValueError as error:
        value = f"{settings} cannot be read: {error}"
        return [Finding("Claude Code", "warn", value, "fix it: Claude Code cannot read it either")]
    merged = {**environ, **own}
    found = [_attribution(merged, rules), _base_url(merged, url), _git(merged, rules, program)]
    return [one for one in found if one is not None]


def _attribution(merged: Mapping[str, str], rules: Mapping[str, bool]) -> Finding:
    name = "Claude Code, attribution"
    if merged.get(ATTRIBUTION, "").lower() in _OFF and ATTRIBUTION in merged:
        return Finding(name, "ok", f"{ATTRIBUTION} is off")
    if rules.get("attribution"):
        return Finding(name, "ok", "the server removes its line (canonicalisation)")
    value = (
        f"{ATTRIBUTION} is not 0: the first line of each prompt differs per conversation, "
        "before version 2.1.181 per request"
    )
    return Finding(name, "warn", value, f"{ATTRIBUTION}=0, or in `env` of ~/.claude/settings.json")


def _git(merged: Mapping[str, str], rules: Mapping[str, bool], program: str | None) -> Finding:
    name = "Claude Code, git status"
    if merged.get(GIT, "").lower() not in ("", *_OFF):
        return Finding(name, "ok", f"{GIT} is set")
    if rules.get("git_status"):
        return Finding(name, "ok", "the server moves it out of the start (canonicalisation)")
    version = _version_of(program, merged) if program is not None else None
    if version is not None and version >= _GIT_IN_MESSAGE:
        value = f"version {version} has it in the first message, after the tools: costs little"
        return Finding(name, "ok", value)
    which = "of this version" if version is not None else "of version 2.1.197 and older"
    value = f"the system prompt {which} has the git status: cold after files have changed"
    return Finding(name, "warn", value, f"{GIT}=1, or serve with --canonicalise git_status=on")


def _version_of(program: str, environ: Mapping[str, str]) -> Version | None:
    with suppress(MlxcacheError):
        printed = version_output(CLIENTS[ClientName.CLAUDE], Path(program), environ)
        if found := re.search(r"\d+\.\d+\.\d+", printed):
            return Version(found[0])
    return None


def _base_url(merged: Mapping[str, str], url: str) -> Finding | None:
    base = merged.get("ANTHROPIC_BASE_URL")
    if not base or not _is_here(base, url):
        return None
    name = "Claude Code, address"
    if urlsplit(base).path.rstrip("/").endswith("/v1"):
        value = f"ANTHROPIC_BASE_URL is {base}; it must not end with /v1"
        return Finding(name, "fail", value, f"ANTHROPIC_BASE_URL={url}")
    if CONTEXT not in merged:
        value = f"{base}, but {CONTEXT} is not set: Claude Code does not know when to compact"
        return Finding(name, "warn", value, "start it with mlxcache launch claude")
    return Finding(name, "ok", base)


def _is_here(base: str, url: str) -> bool:
    """Return whether the URL `base`, which may be invalid, has the host and port of `url`."""
    try:
        ours, theirs = urlsplit(url), urlsplit(base)
        if theirs.port != ours.port:
            return False
    except ValueError:
        return False
    hosts = {theirs.hostname, ours.hostname}
    return len(hosts) == 1 or hosts <= {"127.0.0.1", "localhost", "::1"}


def _anyclaude(environ: Mapping[str, str], url: str) -> Finding:
    mode = environ.get("ANYCLAUDE_MODE")
    remedy = "start it with mlxcache launch anyclaude"
    if mode not in _MODES:
        value = f"ANYCLAUDE_MODE is {mode or 'not set'}: anyclaude uses another server"
        return Finding("anyclaude", "warn", value, remedy)
    for name in _ADDRESSES:
        base = environ.get(name)
        if base is None:
            continue
        if not base.rstrip("/").endswith("/v1"):
            value = f"{name} is {base}; it must end with /v1"
            return Finding("anyclaude", "fail", value, f"{name}={base.rstrip('/')}/v1")
        if not _is_here(base, url):
            value = f"{name} is {base}, not this server's {url}"
            return Finding("anyclaude", "warn", value, remedy)
    if not any(name in environ for name in _ADDRESSES):
        value = f"neither {_ADDRESSES[0]} nor {_ADDRESSES[1]} is set"
        return Finding("anyclaude", "warn", value, remedy)
    return Finding("anyclaude", "ok", f"ANYCLAUDE_MODE={mode}, at {url}")


def _opencode(path: Path, url: str, rules: Mapping[str, bool]) -> list[Finding]:
    try:
        own = read_object(path)
    except ValueError as error:
        value = f"{path} cannot be read: {error}"
        return [Finding("OpenCode", "warn", value, "fix it: OpenCode cannot read it either")]
    found = []
    if _mapping(own, "compaction").get("prune") and not rules.get("cleared_results"):
        value = f"{path} sets compaction.prune: old results are removed mid-conversation"
        remedy = '"compaction": {"prune": false}, else the tokens after them are computed again'
        found.append(Finding("OpenCode, pruning", "warn", value, remedy))
    for provider in _mapping(own, "provider").values():
        base = _mapping(provider, "options").get("baseURL") if isinstance(provider, dict) else None
        if isinstance(base, str) and _is_here(base, url):
            found.append(_opencode_provider(path, provider, base))
    return found


def _opencode_provider(path: Path, provider: Mapping[str, Any], base: str) -> Finding:
    if not urlsplit(base).path.rstrip("/").endswith("/v1"):
        value = f"baseURL in {path} is {base}; it must end with /v1"
        return Finding("OpenCode, address", "fail", value, f"{base.rstrip('/')}/v1")
    models = _mapping(provider, "models")
    unlimited = [
        name for name in models if not _mapping(_mapping(models, name), "limit").get("context")
    ]
    if unlimited:
        value = f"{unlimited[0]} has no limit.context in {path}: OpenCode compacts too late"
        return Finding("OpenCode, context", "warn", value, "mlxcache launch opencode sets it")
    return Finding("OpenCode, address", "ok", base)


def _mapping(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = value.get(name)
    return found if isinstance(found, dict) else {}
