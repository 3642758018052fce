"""The lines to paste that point a coding agent at this server."""

from __future__ import annotations

import ipaddress
import shlex

DUMMY_KEY = "local"
"""What clients that insist on a key are given where the server asks for none."""
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


def claude_code(url: str, model: str, context: int, *, has_key: bool) -> str:
    """The shell line that starts Claude Code on this server.

    `context` is in tokens. The attribution line is switched off at its source, since it changes
    the first tokens of a prompt. Source: https://code.claude.com/docs/en/llm-gateway.
    """
    return _line(
        "claude",
        ANTHROPIC_BASE_URL=url,
        ANTHROPIC_AUTH_TOKEN=None if has_key else DUMMY_KEY,
        ANTHROPIC_MODEL=model,
        CLAUDE_CODE_MAX_CONTEXT_TOKENS=str(context),
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_ATTRIBUTION_HEADER="0",
    )


def anyclaude(url: str, context: int, *, has_key: bool) -> str:
    """The shell line that starts anyclaude on this server, whichever version it is.

    `context` is in tokens. Older versions read MLX_LM_*, newer ones LOCAL_*.
    """
    key = None if has_key else DUMMY_KEY
    return _line(
        "anyclaude",
        ANYCLAUDE_MODE="mlx-lm",
        MLX_LM_URL=f"{url}/v1",
        MLX_LM_MODEL="current-model",
        MLX_LM_API_KEY=key,
        LOCAL_URL=f"{url}/v1",
        LOCAL_MODEL="current-model",
        LOCAL_API_KEY=key,
        LOCAL_CONTEXT_LENGTH=str(context),
    )


def _line(command: str, **variables: str | None) -> str:
    """`NAME=value ... command` for a POSIX shell; None stands for the server's key."""
    words = (
        f"{name}={KEY_VARIABLE if value is None else shlex.quote(value)}"
        for name, value in variables.items()
    )
    return " ".join([*words, command])
