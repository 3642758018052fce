"""The settings of a server, with one entry for each.

A field of `Settings` defines all of a setting: type, default, parser and help text. The names of
its flag, environment variable and config.toml key follow from the name of the field, and `SETTINGS`
lists the entries. To add a setting, add one field.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from mlxcache.config.folder import default_cache_dir
from mlxcache.config.models import Keep, ModelEntry, Route, check_names, check_routes, match_model
from mlxcache.config.remote import RemoteUrl, read_remote_url
from mlxcache.config.rules import RULES, read_rules
from mlxcache.config.sizes import read_size
from mlxcache.config.values import (
    NO_LIMIT,
    KVBits,
    check_ram,
    check_size_or_off,
    read_context,
    read_files,
    read_idle,
    read_kv_bits,
    read_level,
    read_model_names,
    read_models,
    read_number,
    read_on_off,
    read_origins,
    read_path,
    read_routes,
    read_seconds,
    read_secrets,
    read_speculate,
    read_switch,
    read_table,
    read_text,
)
from mlxcache.errors import ConfigError

ENV_PREFIX = "MLXCACHE_"

LogLevel = Literal["debug", "info", "warning", "error"]

MOST_DRAFTED = 15
"""Most tokens drafted at once; one more would be as long as the shortest prefill chunk."""

MOST_GUESSED = 31
"""Most tokens guessed at once; with the token before them a pass has 32."""

FIRST = "Used first"
_USED_FIRST = (
    *("model", "ram", "disk", "context", "kv_bits", "concurrency"),
    *("host", "port", "api_key", "cache_dir"),
)

PANELS: Mapping[str, str] = {
    "model": "Model",
    "ram": "Memory and speed",
    "hosts": "Several machines",
    "host": "Server",
    "cache_dir": "Other",
}
"""Headings in --help, by the first setting under each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Description of one setting.

    `read` converts a flag, a variable or a TOML value, and raises ValueError, TypeError or
    ConfigError. `panel`: the heading of the flag in --help. `metavar`: the placeholder of its
    value, empty for a switch. `default`: the default in words, for the table of settings.
    `only_key`: there is a key in config.toml, but neither flag nor variable.
    """

    name: str
    read: Callable[[object], Any]
    panel: str
    metavar: str
    help: str
    default: str
    repeatable: bool = False
    only_key: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()


def _setting(
    default: object,
    read: Callable[[object], object],
    metavar: str,
    help: str,
    *,
    shown: str | None = None,
    repeatable: bool = False,
    only_key: bool = False,
    secret: bool = False,
) -> Any:
    if shown is None and isinstance(default, str | int) and not isinstance(default, bool):
        shown = str(default)
    entry = {
        "read": read,
        "metavar": metavar,
        "help": help if shown is None else f"{help} Default: {shown}.",
        "default": shown or ("none" if metavar else "false"),
        "repeatable": repeatable,
        "only_key": only_key,
    }
    if callable(default):
        return field(default_factory=default, repr=not secret, metadata=entry)
    return field(default=default, repr=not secret, metadata=entry)


def _switch(help: str) -> Any:
    return _setting(False, read_switch, "", help)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of `mlxcache serve`, in the order of its help. Lengths are in tokens.

    None means no limit, or the default that the help names. `canonicalise` holds only the rules
    that were switched explicitly; `rules` has all of them. `models` is empty if one model is served
    that has no table of its own; `entries` is never empty. If `models` is given, `model` is that of
    the first entry.
    """

    model: str | None = _setting(
        None,
        read_model_names,
        "PATH|HUB_ID|NAME",
        "A model's folder, its id on the Hugging Face Hub, or its NAME in config.toml. Repeatable: "
        "each is loaded when a request names it, the first also for unknown names.",
        shown="a built-in demo",
        repeatable=True,
    )
    models: tuple[ModelEntry, ...] = _setting(
        (),
        read_models,
        "TABLE",
        "A table [models.NAME] for each of several models; the first is the default.",
        only_key=True,
    )
    route: tuple[Route, ...] = _setting(
        (),
        read_routes,
        "PATTERN=NAME",
        "Serve requests whose model name matches PATTERN, such as 'claude-haiku-*', with the model "
        "NAME. Repeatable: the first match counts.",
        repeatable=True,
    )
    idle_unload: float | None = _setting(
        None,
        read_idle,
        "DURATION|off",
        "Unload a model after this long without a request, such as 15m, 1h or 90s; its "
        "conversations stay on disk.",
        shown="not unloaded",
    )
    adapter: str | None = _setting(None, read_text, "PATH", "The folder of a LoRA adapter.")
    draft_model: str | None = _setting(
        None,
        read_text,
        "PATH|HUB_ID",
        "A small model with the same tokenizer, or a model's heads, which propose tokens to check.",
    )
    num_draft_tokens: int = _setting(
        3,
        read_number(1, MOST_DRAFTED, example=3),
        "N",
        "Most tokens that the draft model or heads propose at once.",
    )
    speculate: Literal["off", "auto", "exact"] = _setting(
        "off",
        read_speculate,
        "off|auto|exact",
        "Guess the next tokens from what the conversation already says, and by the model's heads, "
        "and check several in one pass where that is faster; replies stay the same, up to "
        "rounding. exact: only in passes that round as passes over one token do.",
    )
    speculate_tokens: int = _setting(
        MOST_GUESSED,
        read_number(1, MOST_GUESSED, example=15),
        "N",
        "With --speculate: most tokens guessed at once.",
    )
    chat_template_args: Mapping[str, Any] = _setting(
        dict,
        read_table,
        "JSON",
        "Arguments for the chat template, such as '{\"enable_thinking\": false}'.",
    )
    no_generation_config: bool = _switch(
        "Do not take sampling defaults from the model's generation_config.json."
    )
    trust_remote_code: bool = _switch("Run Python code from the model's folder.")
    ram: str | int = _setting(
        "auto",
        check_ram,
        "SIZE|PERCENT|auto",
        "All memory besides the weights, or with several models including them: 8GB, 25%, auto. A "
        "bare number is bytes.",
    )
    disk: str | int = _setting(
        "auto",
        check_size_or_off,
        "SIZE|PERCENT|auto|off",
        "Disk space for conversations: 50GB, 10%, auto, off.",
    )
    wire: str | int = _setting(
        "auto",
        check_size_or_off,
        "auto|off|SIZE|PERCENT",
        "Memory that a Mac never pages out. auto wires what weights and cache need if that is more "
        "than two thirds of the memory, else nothing: wired memory has led to kernel panics.",
    )
    context: int | None = _setting(
        None,
        read_context,
        "N",
        "Most tokens of a prompt and its reply together.",
        shown="the model's own",
    )
    max_tokens: int | None = _setting(
        None,
        read_number(1, NO_LIMIT, example=4096),
        "N",
        "Most tokens of a reply if the request sets no limit.",
        shown="what the context leaves",
    )
    concurrency: int = _setting(
        8, read_number(1, 256, example=8), "N", "Requests computed at once."
    )
    queue: int = _setting(
        64,
        read_number(0, 100_000, example=64),
        "N",
        "Requests that may wait, at most half of them from one session; further ones are answered "
        "503 or 429.",
    )
    request_timeout: float | None = _setting(
        None,
        read_seconds,
        "SECONDS",
        "Time that a request may take, including the queue.",
        shown="no limit",
    )
    prefill_chunk: int = _setting(
        2048,
        read_number(16, 65536, example=2048),
        "N",
        "Most prompt tokens computed in one step.",
    )
    kv_bits: KVBits = _setting(
        None,
        read_kv_bits,
        "4|8|auto",
        "Quantise keys and values to 4 or 8 bits; auto: to 8 if they are too large for --ram.",
        shown="not quantised",
    )
    warm: tuple[Path, ...] = _setting(
        (),
        read_files,
        "FILE",
        "A file with a chat request or system prompt to compute at the start; repeatable.",
        repeatable=True,
    )
    no_loop_guard: bool = _switch("Do not end replies that repeat the same tokens again and again.")
    no_anticipate: bool = _switch("Do not compute the next turn's prefix while idle.")
    hosts: str | None = _setting(
        None,
        read_text,
        "HOST,HOST",
        "Divide the model among these machines, of which the first is this one (experimental).",
        shown="this machine alone",
    )
    hostfile: Path | None = _setting(
        None,
        read_path,
        "FILE",
        "Divide the model among the machines in this file of mlx.launch (experimental).",
        shown="this machine alone",
    )
    pipeline: bool = _switch(
        "With several machines: give each some of the layers, not a part of every layer."
    )
    host: str = _setting("127.0.0.1", read_text, "HOST", "The address to listen on.")
    port: int = _setting(
        8081,
        read_number(0, 65535, example=8081),
        "PORT",
        "The port to listen on; 0 picks a free one.",
    )
    api_key: tuple[str, ...] = _setting(
        (),
        read_secrets,
        "KEY",
        "Require this key from every client. Safer in MLXCACHE_API_KEY than on the command line. "
        "Repeatable: then each key has sessions of its own.",
        repeatable=True,
        secret=True,
    )
    api_keys_file: Path | None = _setting(
        None,
        read_path,
        "FILE",
        "A file with a key per line, as KEY or NAME:KEY; each key has sessions of its own.",
    )
    allow_origin: tuple[str, ...] = _setting(
        (),
        read_origins,
        "ORIGIN",
        "Allow web pages of this origin, such as http://localhost:3000; repeatable.",
        repeatable=True,
    )
    insecure: bool = _switch("Allow other machines to connect without a key.")
    cache_dir: Path = _setting(
        default_cache_dir,
        read_path,
        "DIR",
        "The folder of the server's files.",
        shown="mlxcache in the user's cache folder, on a Mac in Application Support",
    )
    remote: RemoteUrl | None = _setting(
        None,
        read_remote_url,
        "URL",
        "Share conversations with other servers through s3://BUCKET/PREFIX, gs://..., az://... or "
        "file:///FOLDER. Credentials come from the environment.",
    )
    remote_key_file: Path | None = _setting(
        None,
        read_path,
        "FILE",
        "A file with the key that encrypts everything in the remote: 64 hexadecimal digits, the "
        "same for all servers.",
    )
    log_level: LogLevel = _setting(
        "info",
        read_level,
        "LEVEL",
        "debug, info, warning or error; requests are logged at info.",
    )
    keep_awake: bool = _setting(
        True,
        read_on_off,
        "on|off",
        "Keep a Mac from idle sleep while requests run.",
        shown="on",
    )
    record: Path | None = _setting(
        None,
        read_path,
        "DIR",
        "Save the bodies of chat requests, that is, whole conversations, in this folder, for "
        "mlxcache explain.",
    )
    canonicalise: Mapping[str, bool] = _setting(
        dict,
        read_rules,
        "RULE=on|off",
        "Switch a canonicalisation rule on or off; repeatable.",
        shown="each rule's own",
        repeatable=True,
    )
    no_canonicalise: bool = _switch("Render requests unchanged: all rules are off.")

    def __post_init__(self) -> None:
        read_size(self.ram)
        for size in (self.disk, self.wire):
            if size != "off":
                read_size(size)
        self._check_models()
        if self.remote_key_file is not None and self.remote is None:
            raise ConfigError("--remote-key-file needs a remote: add --remote URL")
        if self.remote is not None and self.disk == "off":
            raise ConfigError(
                "--remote needs the disk, where what is fetched is kept: remove --disk off"
            )
        has_key = bool(self.api_key) or self.api_keys_file is not None
        if not (self.insecure or has_key or is_loopback(self.host)):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines: add --api-key KEY, "
                "or --insecure to serve without a key"
            )

    def _check_models(self) -> None:
        if self.models and self.model is None:
            object.__setattr__(self, "model", self.models[0].model)
        if self.models and self.model != self.models[0].model:
            raise ConfigError(f"model is {self.model}, but the first of models is another one")
        for name in ("adapter", "draft_model"):
            if len(self.models) > 1 and getattr(self, name) is not None:
                raise ConfigError(
                    f"{SETTINGS[name].flag} does not tell for which of the models it is: set "
                    f"{name} in the table [models.NAME] of config.toml"
                )
        check_names(self.entries)
        try:
            check_routes(self.route, self.entries)
        except ConfigError as error:
            raise ConfigError(f"--route {error}") from error

    @property
    def feeds_images(self) -> bool:
        """False if `kv_bits`, `hosts` or `hostfile` is set, with which models get no images.

        mlx-vlm is then used only for models that mlx-lm cannot run. True does not mean that the
        model takes images.
        """
        return self.kv_bits is None and self.hosts is None and self.hostfile is None

    def check_divisible(self) -> None:
        """Raise ConfigError if the settings do not allow to divide the model among machines.

        A divided model cannot have a draft model, `--speculate`, an idle time after which it
        is unloaded, or a remote; it cannot be the demo or one of several models. `--hosts` and
        `--hostfile` cannot both be set.
        """
        if self.hosts is not None and self.hostfile is not None:
            raise ConfigError("--hosts and --hostfile both name the machines: set one of them")
        entry = self.entries[0]
        for is_set, what, instead in (
            (len(self.models) > 1, "several models", "name one with --model"),
            (entry.model is None, "the built-in demo", "name a model with --model"),
            (self.for_model(entry).draft_model is not None, "--draft-model", "leave it out"),
            (self.speculate != "off", "--speculate", "leave it out"),
            (isinstance(self.keep_for(entry), int | float), "--idle-unload", "leave it out"),
            (self.remote is not None, "--remote", "leave it out"),
            (self.kv_bits == "auto", "--kv-bits auto", "set 8 or 4, or leave it out"),
        ):
            if is_set:
                raise ConfigError(f"a model on several machines cannot have {what} yet: {instead}")

    @property
    def entries(self) -> tuple[ModelEntry, ...]:
        """All models that are offered, at least one. The first is the default."""
        if self.models:
            return self.models
        return (
            ModelEntry(
                self.model,
                context=self.context,
                adapter=self.adapter,
                draft_model=self.draft_model,
                chat_template_args=self.chat_template_args,
            ),
        )

    def for_model(self, entry: ModelEntry) -> Settings:
        """Return the settings of an engine that serves only the model of `entry`."""
        return replace(
            self,
            model=entry.model,
            models=(entry,),
            route=(),
            adapter=entry.adapter or self.adapter,
            draft_model=entry.draft_model or self.draft_model,
            context=entry.context or self.context,
            chat_template_args=entry.chat_template_args or self.chat_template_args,
        )

    def for_request(self, requested: str | None) -> Settings:
        return self.for_model(self.entries[match_model(requested, self.entries, self.route)])

    def keep_for(self, entry: ModelEntry) -> Keep:
        if entry.keep is not None:
            return entry.keep
        return "demand" if self.idle_unload is None else self.idle_unload

    @property
    def rules(self) -> Mapping[str, bool]:
        if self.no_canonicalise:
            return dict.fromkeys(RULES, False)
        return {**RULES, **self.canonicalise}


def _settings() -> Iterator[Setting]:
    panel = ""
    for one in fields(Settings):
        panel = PANELS.get(one.name, panel)
        heading = FIRST if one.name in _USED_FIRST else panel
        yield Setting(name=one.name, panel=heading, **one.metadata)


SETTINGS: Mapping[str, Setting] = {one.name: one for one in _settings()}
"""Entry of each setting by its key in config.toml, in the order of --help."""

CONFIG = Setting(
    name="config",
    read=read_path,
    panel=PANELS["cache_dir"],
    metavar="FILE",
    help="A TOML file of settings; flags and variables override it. "
    "Default: config.toml in the user's configuration folder.",
    default="config.toml in the user's configuration folder",
)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
