"""Coding agents that can be launched, and the settings that connect each to a server.

Nothing here starts a client or changes the user's settings.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from packaging.version import Version

from mlxcache.cli.connect import claude_env, claude_folder, read_object
from mlxcache.config.settings import is_loopback

KEY_VARIABLE = "MLXCACHE_API_KEY"
"""The variable from which OpenCode, Codex and pi read the key."""

ANY_MODEL = "current-model"
"""Model name for clients. The server accepts any name, so it need not change with the model."""

DUMMY_KEY = "local"
"""API key for clients that need one to start, used if the server requires none."""

Variables = Mapping[str, str | None]
"""Environment variables of a client by name. None stands for the server's key."""

_MOST_OUTPUT = 16_384

_HOUR_MS = 3_600_000
"""An hour in milliseconds: a timeout for clients, as the first prompt can take minutes."""


@dataclass(frozen=True, slots=True)
class Service:
    """Server to which a client is pointed, at `url` without /v1, with the API `key` it requires.

    `model` is the model's id and `asked` the name that clients send, by default one that stands for
    the default model. `small` is the id of the model for titles and sub-agents, if it is another.
    """

    url: str
    model: str
    context: int
    key: str | None = field(default=None, repr=False)
    asked: str = ANY_MODEL
    small: str | None = None

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def credential(self) -> str:
        """Key that clients send: the server's, or a placeholder if it requires none."""
        return self.key or DUMMY_KEY

    @property
    def output(self) -> int:
        """Maximum tokens of a reply for clients to request, so that the prompt has room."""
        return min(_MOST_OUTPUT, self.context // 4)


@dataclass(frozen=True, slots=True)
class Invocation:
    """Client program with the user's own arguments, environment and folders."""

    program: Path
    arguments: Sequence[str]
    environ: Mapping[str, str]
    home: Path
    cwd: Path
    installed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Variables, arguments and settings that point a client at a server.

    Variables in `unset` are removed because they would select another server. `arguments` come
    before the user's own. If `settings_in` names a flag or a variable, `settings` are written to a
    temporary file as JSON, and its path is passed there. `by_hand` tells the user what to put where
    instead, if `launch` only prints the setup.
    """

    variables: Variables
    unset: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    settings_in: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    by_hand: str | None = None

    def environment(self, service: Service, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the client's complete environment, based on the user's `environ`."""
        kept = without_script_settings(environ)
        for name in self.unset:
            kept.pop(name, None)
        return kept | proxy_bypass(service, environ) | self.values(service)

    def values(self, service: Service) -> dict[str, str]:
        """Return the variables, with the server's key in place of None."""
        return {
            name: service.credential if value is None else value
            for name, value in self.variables.items()
        }


# -- the environment of every client -----------------------------------------------------------

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_NO_PROXY = ("NO_PROXY", "no_proxy")


def proxy_bypass(service: Service, environ: Mapping[str, str]) -> dict[str, str]:
    """Return NO_PROXY and no_proxy with values that exclude a server on this machine from a proxy.

    Otherwise the prompts and the key would be sent to the proxy, which cannot reach the server.
    """
    host = urlsplit(service.url).hostname or ""
    has_proxy = any(environ.get(name) or environ.get(name.lower()) for name in _PROXIES)
    if not has_proxy or not is_loopback(host):
        return {}
    given = next((environ[name] for name in _NO_PROXY if environ.get(name)), "")
    return dict.fromkeys(_NO_PROXY, ",".join(filter(None, (given, host))))


_ADDED = (("LD_PRELOAD", "libopenblas.so.0"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"))
"""Variables that hold lists, each with the entry that the scripts in bin/ add on Linux."""


def without_script_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without `_ADDED`, which must not affect the programs that an agent runs."""
    found = dict(environ)
    for name, added in _ADDED:
        if name in found:
            words = [word for word in found[name].split(":") if not word.endswith(added)]
            found[name] = ":".join(words)
            if not words:
                del found[name]
    return found


def has_flag(arguments: Sequence[str], *flags: str) -> bool:
    """Return whether one of `arguments` begins with one of `flags`."""
    return any(argument.startswith(flags) for argument in arguments)


def shell_line(command: str, variables: Variables, *, has_key: bool) -> str:
    words = (f"{name}={quote_value(value, has_key=has_key)}" for name, value in variables.items())
    return " ".join([*words, command])


def quote_value(value: str | None, *, has_key: bool) -> str:
    """Quote the value of a variable for a POSIX shell.

    A real key is never written to the terminal or a log: None becomes a reference to the variable
    MLXCACHE_API_KEY if the server requires a key, else a dummy key.
    """
    if value is not None:
        return shlex.quote(value)
    return f'"${KEY_VARIABLE}"' if has_key else DUMMY_KEY


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# -- Claude Code and anyclaude -----------------------------------------------------------------

_OTHER_PROVIDERS = (
    "ANTHROPIC_API_KEY",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_VERTEX",
)
"""Variables that make Claude Code use another server, or send a key of another server."""

_MODE_FLAGS = ("--permission-mode", "--dangerously-skip-permissions", "--allow-dangerously-skip")
_SETTINGS_FLAG = "--settings"


def claude_variables(service: Service) -> Variables:
    """Return the variables that point Claude Code at a server.

    The attribution header is switched off, because it changes the first tokens of each prompt.
    By default, Claude Code 2.1.197 waits ten minutes for a reply, and five for the next event of a
    stream, not counting pings. Source: https://code.claude.com/docs/en/llm-gateway.
    """
    return {
        "ANTHROPIC_BASE_URL": service.url,
        "ANTHROPIC_AUTH_TOKEN": None,
        "ANTHROPIC_MODEL": service.model,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(service.context),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "API_TIMEOUT_MS": str(_HOUR_MS),
        "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(_HOUR_MS),
    }


def configure_claude(service: Service, invocation: Invocation) -> Setup:
    """Return the setup of Claude Code.

    `env` in Claude Code's settings files overrides the environment. The variables of this setup
    that are also defined there are therefore passed in a further settings file, which takes
    precedence, unless the user's own arguments have --settings.
    """
    variables = dict(claude_variables(service))
    if service.small is not None:
        # for titles, background requests and `haiku` sub-agents
        variables["ANTHROPIC_DEFAULT_HAIKU_MODEL"] = service.small
    own = list(_claude_settings(invocation))
    set_there: set[str] = set()
    for settings in own:
        with suppress(ValueError):
            set_there |= set(claude_env(settings))
    env = Setup(variables=variables).values(service) | dict.fromkeys(_OTHER_PROVIDERS, "")
    overridden = {name: value for name, value in env.items() if name in set_there}
    needs_file = bool(overridden) and not has_flag(invocation.arguments, _SETTINGS_FLAG)
    # newer versions default to auto mode, in which Anthropic's server decides instead of the user
    chose_mode = has_flag(invocation.arguments, *_MODE_FLAGS) or any(
        _object(settings.get("permissions")).get("defaultMode") for settings in own
    )
    return Setup(
        variables=variables,
        unset=_OTHER_PROVIDERS,
        arguments=() if chose_mode else ("--permission-mode", "default"),
        settings_in=_SETTINGS_FLAG if needs_file else None,
        settings={"env": overridden},
    )


def anyclaude_variables(service: Service) -> Variables:
    """Return the variables that point any version of anyclaude at a server.

    Older versions read MLX_LM_*, newer ones LOCAL_*. anyclaude sets Claude Code's ANTHROPIC_*
    itself and passes its other variables on.
    """
    claude = claude_variables(service).items()
    return {
        "ANYCLAUDE_MODE": "mlx-lm",
        "MLX_LM_URL": service.v1,
        "MLX_LM_MODEL": service.asked,
        "MLX_LM_API_KEY": None,
        "LOCAL_URL": service.v1,
        "LOCAL_MODEL": service.asked,
        "LOCAL_API_KEY": None,
        "LOCAL_CONTEXT_LENGTH": str(service.context),
        **{name: value for name, value in claude if not name.startswith("ANTHROPIC_")},
    }


def configure_anyclaude(service: Service, _: Invocation) -> Setup:
    return Setup(
        variables=anyclaude_variables(service),
        unset=("MLX_MODEL_PATH",),  # with it, anyclaude starts a server of its own at this address
    )


def _claude_settings(invocation: Invocation) -> Iterator[Mapping[str, Any]]:
    """Yield the content of the user's settings file of Claude Code, then of the project's two.

    A missing file yields {}, and a broken one, which Claude Code itself reports, nothing.
    """
    folders = (claude_folder(invocation.environ, invocation.home), invocation.cwd / ".claude")
    for path in (*(one / "settings.json" for one in folders), folders[1] / "settings.local.json"):
        with suppress(ValueError):
            yield read_object(path)


# -- OpenCode ----------------------------------------------------------------------------------

_OPENCODE_VARIABLE = "OPENCODE_CONFIG_CONTENT"
"""Variable with settings that override those in files. Source: https://opencode.ai/docs/config."""


def configure_opencode(service: Service, invocation: Invocation) -> Setup:
    """Return the setup of OpenCode, with the user's other settings."""
    try:
        own = _object(json.loads(invocation.environ.get(_OPENCODE_VARIABLE) or "{}"))
    except ValueError:
        own = {}
    limit = {"context": service.context, "output": service.output}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlxcache",
        "options": {
            "baseURL": service.v1,
            "apiKey": f"{{env:{KEY_VARIABLE}}}",
            "timeout": False,  # the default of five minutes is too short for a long first prompt
        },
        "models": {
            service.asked: {"name": service.model, "limit": limit},
            **({service.small: {"name": service.small}} if service.small else {}),
        },
    }
    merged = {
        **own,
        "provider": {**_object(own.get("provider")), "mlxcache": provider},
        "model": f"mlxcache/{service.asked}",
        "small_model": f"mlxcache/{service.small or service.asked}",
    }
    return Setup(variables={_OPENCODE_VARIABLE: json.dumps(merged), KEY_VARIABLE: None})


# -- Codex -------------------------------------------------------------------------------------

_CODEX_PROVIDER = "model_providers.mlxcache"


def configure_codex(service: Service, _: Invocation) -> Setup:
    settings = {
        "model": service.asked,
        "model_provider": "mlxcache",
        "model_context_window": service.context,
        f"{_CODEX_PROVIDER}.name": "mlxcache",
        f"{_CODEX_PROVIDER}.base_url": service.v1,
        f"{_CODEX_PROVIDER}.env_key": KEY_VARIABLE,
        f"{_CODEX_PROVIDER}.wire_api": "responses",
        f"{_CODEX_PROVIDER}.stream_idle_timeout_ms": _HOUR_MS,
    }
    # a text or number in JSON is also one in TOML
    words = (f"{name}={json.dumps(value)}" for name, value in settings.items())
    return Setup(
        variables={KEY_VARIABLE: None},
        arguments=tuple(word for one in words for word in ("-c", one)),
    )


# -- Qwen Code ---------------------------------------------------------------------------------

QWEN_SETTINGS = "QWEN_CODE_SYSTEM_SETTINGS_PATH"
"""Variable with the path of settings that override the user's and the project's."""

_QWEN_MACHINE = (Path("/Library/Application Support/QwenCode"), Path("/etc/qwen-code"))
"""Folders in which a machine's settings may be, on a Mac and on Linux."""


def configure_qwen(
    service: Service, invocation: Invocation, machine: Sequence[Path] = _QWEN_MACHINE
) -> Setup:
    """Return the setup of Qwen Code.

    The context length can only be set in a settings file. A temporary one is read instead of the
    machine-wide settings file. It is not written if the user or the machine has such a file.
    """
    chosen = (("--auth-type", "openai"), ("--model", service.asked))
    given = invocation.arguments
    words = [  # a flag that is given twice makes Qwen Code fail
        pair
        for pair in chosen
        if not has_flag(given, pair[0]) and not (pair[0] == "--model" and "-m" in given)
    ]
    has_own = QWEN_SETTINGS in invocation.environ or any(one.exists() for one in machine)
    length = {"model": {"generationConfig": {"contextWindowSize": service.context}}}
    return Setup(
        variables={
            "OPENAI_BASE_URL": service.v1,
            "OPENAI_API_KEY": None,
            "OPENAI_MODEL": service.asked,
            "QWEN_CODE_API_TIMEOUT_MS": str(_HOUR_MS),
            "QWEN_STREAM_IDLE_TIMEOUT_MS": str(_HOUR_MS),
            "QWEN_STREAM_MAX_LIFETIME_MS": str(_HOUR_MS),
        },
        arguments=tuple(word for pair in words for word in pair),
        settings_in=None if has_own else QWEN_SETTINGS,
        settings=length,
        by_hand="No variable tells Qwen Code the context length. In a settings file of it: "
        f"{json.dumps(length)}",
    )


# -- pi ----------------------------------------------------------------------------------------

PI_EXTENSION = Path(__file__).with_name("pi_provider.js")
"""Extension that registers the provider in the variable PI_MLXCACHE_PROVIDER for one run.
Source: docs/custom-provider.md of pi's package.
"""


def configure_pi(service: Service, _: Invocation) -> Setup:
    model = {
        "id": service.asked,
        "name": service.model,
        "reasoning": False,
        "input": ["text"],
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
        "contextWindow": service.context,
        "maxTokens": service.output,
    }
    provider = {
        "baseUrl": service.v1,
        "api": "openai-completions",
        "apiKey": f"${KEY_VARIABLE}",
        "models": [model],
    }
    return Setup(
        variables={"PI_MLXCACHE_PROVIDER": json.dumps(provider), KEY_VARIABLE: None},
        arguments=("-e", str(PI_EXTENSION), "--provider", "mlxcache", "--model", service.asked),
    )


# -- Cline -------------------------------------------------------------------------------------

_NO_HUB = {
    "CLINE_SESSION_BACKEND_MODE": "local",
    "CLINE_HUB_DISCOVERY_PATH": "/dev/null/no-hub",  # cannot exist, so that no hub registers in it
}
"""Variables with which Cline runs a session in its own process and starts no hub."""

_CLINE_PROVIDER = "openai-compatible"


def configure_cline(service: Service, _: Invocation) -> Setup:
    """Return the setup of Cline: a file of providers that has only this server.

    By default Cline runs its sessions in a daemon, its hub, which outlives the client and has the
    environment of the client that started it. A hub that runs already would send the prompts to
    the user's own provider, and one that this client started would use a deleted file of providers,
    also for the user's next run. So the session runs in the client, and no hub is found or started.
    """
    provider = {
        "provider": _CLINE_PROVIDER,
        "apiKey": service.credential,
        "model": service.asked,
        "baseUrl": service.v1,
        "contextWindow": service.context,
        "maxTokens": service.output,
    }
    entry = {
        "settings": provider,
        "updatedAt": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        "tokenSource": "manual",
    }
    return Setup(
        variables={"CLINE_NO_AUTO_UPDATE": "1", **_NO_HUB},
        settings_in="CLINE_PROVIDER_SETTINGS_PATH",
        settings={
            "version": 1,
            "lastUsedProvider": _CLINE_PROVIDER,
            "modes": {},
            "providers": {_CLINE_PROVIDER: entry},
        },
        by_hand="No variable points Cline at a server. This writes it to Cline's own settings: "
        f"cline auth -p {_CLINE_PROVIDER} -k KEY -m {service.asked} -b {service.url}/v1",
    )


# -- Copilot CLI -------------------------------------------------------------------------------

_OTHER_CREDENTIALS = (
    "COPILOT_PROVIDER_API_KEY_COMMAND",
    "COPILOT_PROVIDER_BEARER_TOKEN",
    "COPILOT_PROVIDER_HEADERS",
    "COPILOT_PROVIDER_MODEL_ID",
    "COPILOT_PROVIDER_TRANSPORT",
    "COPILOT_PROVIDER_WIRE_MODEL",
)
"""Variables that would send another server's credentials, or ask for another model."""


def configure_copilot(service: Service, _: Invocation) -> Setup:
    """Return the setup of Copilot CLI. Source: `copilot help providers`."""
    return Setup(
        variables={
            "COPILOT_PROVIDER_BASE_URL": service.v1,
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_WIRE_API": "completions",
            "COPILOT_PROVIDER_API_KEY": None,
            "COPILOT_MODEL": service.asked,
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(service.context - service.output),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(service.output),
        },
        unset=_OTHER_CREDENTIALS,
    )


# -- Continue ----------------------------------------------------------------------------------


def configure_continue(service: Service, invocation: Invocation) -> Setup:
    """Return the setup of Continue's CLI: a configuration that has only this server.

    It is not used if the user's own arguments have --config. The key is in a variable, which
    Continue puts in place of `${{ secrets.NAME }}`. Source: https://docs.continue.dev/reference.
    """
    model = {
        "name": "mlxcache",
        "provider": "openai",
        "model": service.asked,
        "apiBase": service.v1,
        "apiKey": f"${{{{ secrets.{KEY_VARIABLE} }}}}",
        "roles": ["chat", "edit", "apply", "summarize"],
        "capabilities": ["tool_use"],
        "contextLength": service.context,
        "defaultCompletionOptions": {
            "contextLength": service.context,
            "maxTokens": service.output,
        },
    }
    config = {"name": "mlxcache", "version": "1.0.0", "schema": "v1", "models": [model]}
    has_own = has_flag(invocation.arguments, "--config")
    return Setup(
        variables={KEY_VARIABLE: None},
        settings_in=None if has_own else "--config",
        settings=config,
        by_hand="No variable points Continue at a server. Write this to FILE: "
        f"{json.dumps(config)}",
    )


# -- all of them -------------------------------------------------------------------------------


class ClientName(StrEnum):
    """Name of a client on the command line, which is also that of its program."""

    CLAUDE = "claude"
    OPENCODE = "opencode"
    CODEX = "codex"
    QWEN = "qwen"
    PI = "pi"
    CLINE = "cline"
    COPILOT = "copilot"
    CONTINUE = "cn"
    ANYCLAUDE = "anyclaude"


@dataclass(frozen=True, slots=True)
class Client:
    """A coding agent and how to set it up.

    `first_prompt` is the number of tokens of its first prompt, with the demo model
    (docs/clients.md); with Node.js before 22, npm may install a version that sends `on_old_node`.
    `oldest` is the first version that was tested with this server, and `node`
    the oldest Node.js with which npm installs it. A program that `prints_version` does nothing else
    with --version. With the command `quiet`, or with one of the flags there, it prints nothing
    before its reply, unless an argument begins with one of `loud`. One that `takes_small` can be
    given a second, smaller model for titles and sub-agents.
    """

    name: ClientName
    title: str
    install: str
    first_prompt: int
    good_for: str
    configure: Callable[[Service, Invocation], Setup]
    oldest: Version | None = None
    node: str = ""
    prints_version: bool = True
    quiet: str | tuple[str, ...] = ()
    loud: tuple[str, ...] = ()
    on_old_node: int = 0
    takes_small: bool = False

    @property
    def missing(self) -> str:
        return (
            f"{self.title} is not installed: there is no `{self.name}` on the PATH. "
            f"Install it with\n{self.install}"
        )

    @property
    def about_first_prompt(self) -> str:
        return f"about {round(self.first_prompt / 500) * 500:,} tokens"

    def is_quiet(self, arguments: Sequence[str]) -> bool:
        if isinstance(self.quiet, str):
            quiet = [self.quiet] == [*arguments[:1]]
        else:
            quiet = has_flag(arguments, *self.quiet)
        return quiet and not has_flag(arguments, *self.loud)


_ON_OLD_NODE = 30_000
"""About that of Claude Code 2.1.197 (docs/clients.md)."""

_PRINT = ("-p", "--print")
_PROMPT = ("-p", "--prompt")

_CLIENTS = (
    Client(
        ClientName.CLAUDE,
        "Claude Code",
        "npm install -g @anthropic-ai/claude-code",
        18_041,
        "the most tools, sub-agents, plans; wants a model that calls tools well",
        configure_claude,
        quiet=_PRINT,
        loud=("stream-json", "--output-format=stream-json"),
        on_old_node=_ON_OLD_NODE,
        takes_small=True,
    ),
    Client(
        ClientName.OPENCODE,
        "OpenCode",
        "npm install -g opencode-ai",
        10_485,
        "fewer tools and a short prompt: the first choice for small models and little memory",
        configure_opencode,
        quiet="run",
        loud=("--format",),
        takes_small=True,
    ),
    Client(
        ClientName.CODEX,
        "Codex",
        "npm install -g @openai/codex",
        13_453,
        "a shell and a patch tool",
        configure_codex,
        Version("0.94.0"),
        quiet="exec",
        loud=("--json",),
    ),
    Client(
        ClientName.QWEN,
        "Qwen Code",
        "npm install -g @qwen-code/qwen-code",
        21_099,
        "made for Qwen's models; sub-agents, a memory of its own",
        configure_qwen,
        Version("0.24.4"),
        node="22",
        quiet=_PROMPT,
        loud=("-i", "--prompt-interactive", "-o", "--output-format"),
    ),
    Client(
        ClientName.PI,
        "pi",
        "npm install -g @earendil-works/pi-coding-agent",
        1_973,
        "four tools and the shortest prompt: quick on any machine",
        configure_pi,
        Version("0.87.1"),
        node="22.19",
        quiet=_PRINT,
        loud=("--mode",),
    ),
    Client(
        ClientName.CLINE,
        "Cline",
        "npm install -g cline",
        8_221,
        "plans and acts; it asks for nothing unless told to",
        configure_cline,
        Version("3.0.65"),
    ),
    Client(
        ClientName.COPILOT,
        "Copilot CLI",
        "npm install -g @github/copilot",
        17_830,
        "GitHub's agent, here without an account",
        configure_copilot,
        Version("1.0.102"),
        quiet=_PROMPT,
        loud=("--output-format",),
    ),
    Client(
        ClientName.CONTINUE,
        "Continue",
        "npm install -g @continuedev/cli",
        2_612,
        "a short prompt with files, a shell and a checklist",
        configure_continue,
        Version("1.5.47"),
        quiet=_PRINT,
    ),
    Client(
        ClientName.ANYCLAUDE,
        "anyclaude",
        "git clone https://github.com/akaszubski/anyclaude-local && cd anyclaude-local && "
        "npm install && npm run install:global",
        18_041,
        "Claude Code through a proxy that shortens prompts, in its mode mlx-lm",
        configure_anyclaude,
        prints_version=False,
        on_old_node=_ON_OLD_NODE,
    ),
)

CLIENTS = {one.name: one for one in _CLIENTS}
