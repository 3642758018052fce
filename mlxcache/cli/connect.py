"""Shell lines and environment variables that point a coding agent at an mlxcache server."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Mapping

ANY_MODEL = "current-model"
"""Model name for clients. The server accepts any name, so it need not change with the model."""

DUMMY_KEY = "local"
"""API key for clients that need one to start, used if the server requires none."""

_LONG_TIMEOUTS = dict.fromkeys(("API_TIMEOUT_MS", "CLAUDE_STREAM_IDLE_TIMEOUT_MS"), "3600000")
"""Timeouts of an hour in ms, for long first prompts.

By default, Claude Code 2.1.197 waits ten minutes for a reply, and five for the next event of a
stream, not counting pings."""

_KEY_IN_SHELL = '"$MLXCACHE_API_KEY"'
"""Shell text in place of a real key, which is never written to the terminal or a log."""


def base_url(host: str, port: int) -> str:
    """Return the URL of a server for clients on this machine, such as `http://127.0.0.1:8081`.

    `host`: the name or address at which the server listens; 0.0.0.0 and :: stand for all addresses,
    and are replaced by 127.0.0.1 and ::1.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{port}"
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"


Variables = Mapping[str, str | None]
"""Environment variables of a client by name. None stands for the server's key."""


def claude_code_variables(url: str, model: str, context: int) -> Variables:
    """Return the environment variables that point Claude Code at the server at `url`.

    `model` is the model name that Claude Code sends, and `context` that model's context length in
    tokens. A value of None stands for the API key. The attribution header is switched off, because
    it changes the first tokens of each prompt. Source: https://code.claude.com/docs/en/llm-gateway.
    """
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": None,
        "ANTHROPIC_MODEL": model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        **_LONG_TIMEOUTS,
    }


def anyclaude_variables(url: str, context: int, model: str = ANY_MODEL) -> Variables:
    """Return the environment variables that point any version of anyclaude at the server at `url`.

    anyclaude is a program that starts Claude Code. It sets Claude Code's variables ANTHROPIC_*, and
    passes on the others of Claude Code, which are in the result. `model` is the model name that
    anyclaude sends, and `context` the context length of that model in tokens. A value of None
    stands for the API key. Older versions of anyclaude read MLX_LM_*, newer ones LOCAL_*.
    """
    for_claude = claude_code_variables(url, model, context)
    return {
        "ANYCLAUDE_MODE": "mlx-lm",
        "MLX_LM_URL": f"{url}/v1",
        "MLX_LM_MODEL": model,
        "MLX_LM_API_KEY": None,
        "LOCAL_URL": f"{url}/v1",
        "LOCAL_MODEL": model,
        "LOCAL_API_KEY": None,
        "LOCAL_CONTEXT_LENGTH": str(context),
        **{name: value for name, value in for_claude.items() if not name.startswith("ANTHROPIC_")},
    }


def claude_code_line(url: str, model: str, context: int, *, has_key: bool) -> str:
    """Return the shell line that starts Claude Code on the server at `url`.

    `model` is the model name that Claude Code sends, and `context` that model's context length in
    tokens. `has_key` tells whether the server requires an API key; see `quote_value`.
    """
    return _line("claude", claude_code_variables(url, model, context), has_key=has_key)


def anyclaude_line(url: str, context: int, *, has_key: bool) -> str:
    """Return the shell line that starts anyclaude on the server at `url`.

    The server's default model is used; `context` is its context length in tokens. `has_key` tells
    whether the server requires an API key; see `quote_value`.
    """
    return _line("anyclaude", anyclaude_variables(url, context), has_key=has_key)


def quote_value(value: str | None, *, has_key: bool) -> str:
    """Quote the value of a variable for a POSIX shell.

    None stands for the API key. The result is then "$MLXCACHE_API_KEY", with the quotes, if the
    server requires a key (`has_key`), else a dummy key.
    """
    if value is not None:
        return shlex.quote(value)
    return _KEY_IN_SHELL if has_key else DUMMY_KEY


def _line(command: str, variables: Variables, *, has_key: bool) -> str:
    """Return the line `NAME=value ... command` for a POSIX shell, with all of `variables`.

    `has_key` tells whether the server requires an API key; see `quote_value`.
    """
    words = (f"{name}={quote_value(value, has_key=has_key)}" for name, value in variables.items())
    return " ".join([*words, command])
