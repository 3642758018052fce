"""Coding agents that can be launched, and the settings that connect each to a server.

Nothing here starts a client or changes the user's settings.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from packaging.version import Version

from mlxcache.cli.agent_settings import claude_env, claude_folder, read_object
from mlxcache.cli.connect import anyclaude_variables, claude_code_variables
from mlxcache.cli.launch.providers import (
    OLDEST_CLINE,
    OLDEST_CONTINUE,
    OLDEST_COPILOT,
    OLDEST_PI,
    OLDEST_QWEN,
    configure_cline,
    configure_continue,
    configure_copilot,
    configure_pi,
    configure_qwen,
    has_flag,
)
from mlxcache.cli.launch.setup import (
    KEY_VARIABLE,
    Invocation,
    Service,
    Setup,
    without_script_settings,
)
from mlxcache.errors import MlxcacheError


@dataclass(frozen=True, slots=True)
class Client:
    """A coding agent and how to set it up.

    `name` is its program and its name on the command line, `title` its name in texts, and `install`
    a shell line that installs it. `first_prompt` is the number of tokens of its first prompt, with
    the demo model (docs/clients.md). `good_for` is a phrase for the menu. `configure` returns its
    setup for a server. `oldest` is the first version that is known to work, or None for any
    version. `node` is the oldest Node.js with which npm installs that version, or "" for any.
    `prints_version` is True if its program accepts --version and then does nothing else.
    `is_quiet(arguments)` returns whether the program, run with `arguments`, prints nothing before
    its reply.
    """

    name: str
    title: str
    install: str
    first_prompt: int
    good_for: str
    configure: Callable[[Service, Invocation], Setup]
    oldest: Version | None = None
    node: str = ""
    prints_version: bool = True
    is_quiet: Callable[[Sequence[str]], bool] = lambda _: False

    @property
    def about_first_prompt(self) -> str:
        """Size of the client's first prompt as text, rounded to 500 tokens."""
        return f"about {round(self.first_prompt / 500) * 500:,} tokens"


# -- Claude Code and anyclaude -----------------------------------------------------------------

_OTHER_PROVIDERS = (
    "ANTHROPIC_API_KEY",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_VERTEX",
)
"""Variables that make Claude Code use another server, or send a key of another server."""

CLAUDE_SMALL = "ANTHROPIC_DEFAULT_HAIKU_MODEL"
"""Variable with the model of Claude Code's titles, background requests and `haiku` sub-agents."""

_MODE_FLAGS = ("--permission-mode", "--dangerously-skip-permissions", "--allow-dangerously-skip")
_SETTINGS_FLAG = "--settings"


def configure_claude(service: Service, invocation: Invocation) -> Setup:
    """Return the setup of Claude Code for `service`.

    `env` in Claude Code's settings files overrides the environment. The variables of this setup
    that are also defined there are therefore passed in a further settings file, named with
    --settings, which takes precedence. No such file is made if the user's own arguments have
    --settings.
    """
    variables = dict(claude_code_variables(service.url, service.model, service.context))
    if service.small is not None:
        variables[CLAUDE_SMALL] = service.small
    own = list(_claude_settings(invocation))
    set_there = {name for settings in own for name in _claude_env(settings)}
    env = {
        name: service.credential if value is None else value for name, value in variables.items()
    } | dict.fromkeys(_OTHER_PROVIDERS, "")
    overridden = {name: value for name, value in env.items() if name in set_there}
    needs_file = bool(overridden) and not has_flag(invocation.arguments, _SETTINGS_FLAG)
    return Setup(
        variables=variables,
        unset=_OTHER_PROVIDERS,
        arguments=_permission_mode(invocation, own),
        settings_flag=_SETTINGS_FLAG if needs_file else None,
        settings={"env": overridden},
    )


def configure_anyclaude(service: Service, invocation: Invocation) -> Setup:
    """Return the setup of anyclaude, which runs Claude Code through a proxy, for `service`."""
    return Setup(
        variables=anyclaude_variables(service.url, service.context, service.asked),
        unset=("MLX_MODEL_PATH",),  # with it, anyclaude starts a server of its own at this address
    )


def _permission_mode(invocation: Invocation, own: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return arguments that make Claude Code ask before each action; () if the user chose a mode.

    Newer versions default to auto mode, in which Anthropic's server decides instead of the user.
    `own` holds the contents of the user's settings files.
    """
    chosen = any(_permissions(settings).get("defaultMode") for settings in own)
    if chosen or has_flag(invocation.arguments, *_MODE_FLAGS):
        return ()
    return ("--permission-mode", "default")


def _is_print_mode(arguments: Sequence[str]) -> bool:
    """Return whether Claude Code, with `arguments`, prints nothing before its final reply."""
    streams = any("stream-json" in argument for argument in arguments)
    return any(one in ("-p", "--print") for one in arguments) and not streams


def _permissions(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    found = settings.get("permissions")
    return found if isinstance(found, dict) else {}


def _claude_settings(invocation: Invocation) -> Iterator[Mapping[str, Any]]:
    """Yield the content of each settings file of Claude Code: the user's, then the project's two.

    A missing file yields {}. So does a broken one, which Claude Code itself reports.
    """
    folders = (claude_folder(invocation.environ, invocation.home), invocation.cwd / ".claude")
    for path in (*(one / "settings.json" for one in folders), folders[1] / "settings.local.json"):
        try:
            yield read_object(path)
        except ValueError:
            yield {}


def _claude_env(settings: Mapping[str, Any]) -> Mapping[str, str]:
    try:
        return claude_env(settings)
    except ValueError:
        return {}


# -- OpenCode ----------------------------------------------------------------------------------

_OPENCODE_VARIABLE = "OPENCODE_CONFIG_CONTENT"
"""Variable with settings that override those in files. Source: https://opencode.ai/docs/config."""

_OPENCODE_PROVIDER = "mlxcache"


def configure_opencode(service: Service, invocation: Invocation) -> Setup:
    """Return the setup of OpenCode for `service`. The user's other settings are kept."""
    own = _json_object(invocation.environ.get(_OPENCODE_VARIABLE))
    providers = own.get("provider")
    merged = {
        **own,
        "provider": {
            **(providers if isinstance(providers, dict) else {}),
            _OPENCODE_PROVIDER: _opencode_provider(service),
        },
        "model": f"{_OPENCODE_PROVIDER}/{service.asked}",
        "small_model": f"{_OPENCODE_PROVIDER}/{service.small or service.asked}",
    }
    return Setup(variables={_OPENCODE_VARIABLE: json.dumps(merged), KEY_VARIABLE: None})


def _opencode_provider(service: Service) -> dict[str, Any]:
    limit = {"context": service.context, "output": service.output}
    return {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlxcache",
        "options": {
            "baseURL": f"{service.url}/v1",
            "apiKey": f"{{env:{KEY_VARIABLE}}}",
            "timeout": False,  # the default of five minutes is too short for a long first prompt
        },
        "models": {
            service.asked: {"name": service.model, "limit": limit},
            **({service.small: {"name": service.small}} if service.small else {}),
        },
    }


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


# -- Codex -------------------------------------------------------------------------------------

OLDEST_CODEX = Version("0.94.0")
"""Oldest version of Codex that was tested with this server."""

_CODEX_INSTALL = "npm install -g @openai/codex"
_CODEX_PROVIDER = "model_providers.mlxcache"
_CODEX_IDLE_MS = 3_600_000


def configure_codex(service: Service, invocation: Invocation) -> Setup:
    """Return the setup of Codex for `service`. The user's config.toml is not changed."""
    settings = {
        "model": service.asked,
        "model_provider": "mlxcache",
        "model_context_window": service.context,
        f"{_CODEX_PROVIDER}.name": "mlxcache",
        f"{_CODEX_PROVIDER}.base_url": f"{service.url}/v1",
        f"{_CODEX_PROVIDER}.env_key": KEY_VARIABLE,
        f"{_CODEX_PROVIDER}.wire_api": "responses",
        f"{_CODEX_PROVIDER}.stream_idle_timeout_ms": _CODEX_IDLE_MS,
    }
    # a text or number in JSON is also one in TOML
    words = (f"{name}={json.dumps(value)}" for name, value in settings.items())
    return Setup(
        variables={KEY_VARIABLE: None},
        arguments=tuple(word for one in words for word in ("-c", one)),
    )


# -- all of them -------------------------------------------------------------------------------


class ClientName(StrEnum):
    """Name of a client on the command line."""

    CLAUDE = "claude"
    OPENCODE = "opencode"
    CODEX = "codex"
    QWEN = "qwen"
    PI = "pi"
    CLINE = "cline"
    COPILOT = "copilot"
    CONTINUE = "cn"
    ANYCLAUDE = "anyclaude"


TAKES_SMALL = (ClientName.CLAUDE, ClientName.OPENCODE)
"""Clients to which a second, smaller model can be named, for titles and sub-agents."""

CLIENTS = {
    ClientName.CLAUDE: Client(
        "claude",
        "Claude Code",
        "npm install -g @anthropic-ai/claude-code",
        18_041,
        "the most tools, sub-agents, plans; wants a model that calls tools well",
        configure_claude,
        is_quiet=_is_print_mode,
    ),
    ClientName.OPENCODE: Client(
        "opencode",
        "OpenCode",
        "npm install -g opencode-ai",
        10_485,
        "fewer tools and a short prompt: the first choice for small models and little memory",
        configure_opencode,
        is_quiet=lambda arguments: "run" in arguments[:1] and "--format" not in arguments,
    ),
    ClientName.CODEX: Client(
        "codex",
        "Codex",
        _CODEX_INSTALL,
        12_992,
        "a shell and a patch tool",
        configure_codex,
        OLDEST_CODEX,
        is_quiet=lambda arguments: "exec" in arguments[:1] and "--json" not in arguments,
    ),
    ClientName.QWEN: Client(
        "qwen",
        "Qwen Code",
        "npm install -g @qwen-code/qwen-code",
        21_099,
        "made for Qwen's models; sub-agents, a memory of its own",
        configure_qwen,
        OLDEST_QWEN,
        node="22",
        is_quiet=lambda arguments: (
            has_flag(arguments, "-p", "--prompt")
            and not has_flag(arguments, "-i", "--prompt-interactive", "-o", "--output-format")
        ),
    ),
    ClientName.PI: Client(
        "pi",
        "pi",
        "npm install -g @earendil-works/pi-coding-agent",
        2_062,
        "four tools and the shortest prompt: quick on any machine",
        configure_pi,
        OLDEST_PI,
        node="22.19",
        is_quiet=lambda arguments: (
            any(one in ("-p", "--print") for one in arguments) and not has_flag(arguments, "--mode")
        ),
    ),
    ClientName.CLINE: Client(
        "cline",
        "Cline",
        "npm install -g cline",
        8_221,
        "plans and acts; it asks for nothing unless told to",
        configure_cline,
        OLDEST_CLINE,
    ),
    ClientName.COPILOT: Client(
        "copilot",
        "Copilot CLI",
        "npm install -g @github/copilot",
        17_830,
        "GitHub's agent, here without an account",
        configure_copilot,
        OLDEST_COPILOT,
        is_quiet=lambda arguments: (
            has_flag(arguments, "-p", "--prompt") and not has_flag(arguments, "--output-format")
        ),
    ),
    ClientName.CONTINUE: Client(
        "cn",
        "Continue",
        "npm install -g @continuedev/cli",
        2_612,
        "a short prompt with files, a shell and a checklist",
        configure_continue,
        OLDEST_CONTINUE,
        is_quiet=lambda arguments: any(one in ("-p", "--print") for one in arguments),
    ),
    ClientName.ANYCLAUDE: Client(
        "anyclaude",
        "anyclaude",
        "git clone https://github.com/akaszubski/anyclaude-local && cd anyclaude-local && "
        "npm install && npm run install:global",
        18_041,
        "Claude Code through a proxy that shortens prompts, in its mode mlx-lm",
        configure_anyclaude,
        prints_version=False,
    ),
}


def find_program(client: Client) -> Path:
    """Return the path of the client's program. Raises MlxcacheError if it is not installed."""
    found = shutil.which(client.name)
    if found is None:
        raise MlxcacheError(
            f"{client.title} is not installed: there is no `{client.name}` on the PATH. "
            f"Install it with\n{client.install}"
        )
    return Path(found)


_VERSION_TIMEOUT_S = 30.0
_TAIL_LINES = 4


def check_program(client: Client, invocation: Invocation) -> None:
    """Run the client's program with `--version` to check it. Blocks until it ends.

    Does nothing if the program is not installed, or if `client.prints_version` is False. Raises
    MlxcacheError if the program fails or takes longer than `_VERSION_TIMEOUT_S`. If `client.oldest`
    is set, also raises it for an older version, or if none is printed.
    """
    if not (invocation.installed and client.prints_version):
        return
    printed = _version_output(client, invocation)
    found = re.search(r"\d+\.\d+\.\d+", printed)
    if client.oldest is None:
        return
    if found is None:
        raise MlxcacheError(f"{invocation.program} --version printed no version: {printed!r}.")
    if Version(found[0]) < client.oldest:
        with_node = f" with Node.js {client.node} or later" if client.node else ""
        raise MlxcacheError(
            f"{client.title} {found[0]} is too old: version {client.oldest} or later is needed. "
            f"Install it{with_node}:\n{client.install}"
        )


def _version_output(client: Client, invocation: Invocation) -> str:
    """Return what the client's program prints to standard output with `--version`.

    Raises MlxcacheError if the program fails or takes longer than `_VERSION_TIMEOUT_S`.
    """
    environ = without_script_settings(invocation.environ)
    words = [str(invocation.program), "--version"]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_VERSION_TIMEOUT_S,
            env=environ,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MlxcacheError(f"{invocation.program} --version failed: {error}.") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-_TAIL_LINES:]
        raise MlxcacheError(
            f"{client.title} does not work: `{invocation.program} --version` ended with status "
            f"{done.returncode}. Install it again with\n{client.install}\n" + "\n".join(said)
        )
    return done.stdout.strip()
