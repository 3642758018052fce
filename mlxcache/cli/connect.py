"""The lines to paste that point a coding agent at this server."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Mapping

ANY_MODEL = "current-model"
"""A name for the model, which has any: a client's settings outlive a change of the model."""
DUMMY_KEY = "local"
"""What clients that insist on a key are given where the server asks for none."""
_PATIENCE = dict.fromkeys(("API_TIMEOUT_MS", "CLAUDE_STREAM_IDLE_TIMEOUT_MS"), "3600000")
"""A first prompt may take longer than Claude Code waits by itself: ten minutes for a reply, and
five for the next event of a stream, where it does not count pings. Seen in 2.1.197."""
KEY_VARIABLE = '"$MLXCACHE_API_KEY"'
"""In place of a real key, which never reaches the terminal or a log."""


def base_url(host: str, port: int) -> str:
    """The address that a client on this machine uses, such as `http://127.0.0.1:8081`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"http://{host}:{port}"
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if address.version == 6 else f"http://{host}:{port}"


Variables = Mapping[str, str | None]
"""What a client finds in its environment; None stands for the server's key."""


def claude_code_variables(url: str, model: str, context: int) -> Variables:
    """What points Claude Code at this server. `context` is in tokens.

    The attribution line is switched off at its source, since it changes the first tokens of a
    prompt. Source: https://code.claude.com/docs/en/llm-gateway.
    """
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": None,
        "ANTHROPIC_MODEL": model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        **_PATIENCE,
    }


def anyclaude_variables(url: str, context: int) -> Variables:
    """What points anyclaude at this server, whichever version it is. `context` is in tokens.

    Older versions read MLX_LM_*, newer ones LOCAL_*. Its proxy sets the address for Claude Code
    beside it; what else that one is told passes through.
    """
    told = claude_code_variables(url, ANY_MODEL, context)
    return {
        "ANYCLAUDE_MODE": "mlx-lm",
        "MLX_LM_URL": f"{url}/v1",
        "MLX_LM_MODEL": ANY_MODEL,
        "MLX_LM_API_KEY": None,
        "LOCAL_URL": f"{url}/v1",
        "LOCAL_MODEL": ANY_MODEL,
        "LOCAL_API_KEY": None,
        "LOCAL_CONTEXT_LENGTH": str(context),
        **{name: value for name, value in told.items() if not name.startswith("ANTHROPIC_")},
    }


def claude_code(url: str, model: str, context: int, *, has_key: bool) -> str:
    """The shell line that starts Claude Code on this server."""
    return _line("claude", claude_code_variables(url, model, context), has_key=has_key)


def anyclaude(url: str, context: int, *, has_key: bool) -> str:
    """The shell line that starts anyclaude on this server."""
    return _line("anyclaude", anyclaude_variables(url, context), has_key=has_key)


def quoted(value: str | None, *, has_key: bool) -> str:
    """A variable's value for a POSIX shell; where there is a key it comes from a variable too."""
    if value is not None:
        return shlex.quote(value)
    return KEY_VARIABLE if has_key else DUMMY_KEY


def _line(command: str, variables: Variables, *, has_key: bool) -> str:
    """`NAME=value ... command` for a POSIX shell."""
    words = (f"{name}={quoted(value, has_key=has_key)}" for name, value in variables.items())
    return " ".join([*words, command])
