"""The settings of one server, checked on construction."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import platformdirs

from mlxcache.config.rules import RULES
from mlxcache.config.sizes import read_size
from mlxcache.errors import ConfigError

LogLevel = Literal["debug", "info", "warning", "error"]

MOST_DRAFTED = 15
"""Tokens that may be drafted at once: with one more they are the shortest chunk of a prefill."""


def _cache_dir() -> Path:
    return platformdirs.user_cache_path("mlxcache")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything `mlxcache serve` is told. Lengths are in tokens.

    `model`: a local path or a Hub id; None serves the built-in demo. `adapter`: the path of a
    LoRA adapter. `draft_model`: a path or a Hub id; it drafts `num_draft_tokens` at once.
    `ram`: see `ram_limit`; `disk`: see `disk_limit`. `context` None: as long as
    the model allows.
    `max_tokens`: what a request that names no limit gets; None is all that the context leaves.
    `concurrency`: requests that compute at once; `queue`: how many more may wait.
    `request_timeout`: seconds after which a request ends with an error; None: it may take any time.
    `prefill_chunk`: the most prompt tokens computed in one step. `chat_template_args`: keyword
    arguments for the model's chat template, which a request's own override.
    `kv_bits`: 4 or 8 for keys and values in so many bits, from the first token on; None: as the
    model computes them.
    `warm`: files that `mlxcache warm` could take, computed at the start. `record`: a folder in
    which the bodies of chat requests are kept, for `mlxcache explain`.
    `canonicalise` switches rules by name, `no_canonicalise` switches all of them off.
    `no_anticipate`: nothing is computed between requests.
    `api_key` and `api_keys_file`: see `read_keys`. `insecure` lets the server listen beyond this
    machine without a key. `allow_origin`: web pages that may ask, by their origins.
    Raises ConfigError where values do not go together.
    """

    model: str | None = None
    host: str = "127.0.0.1"
    port: int = 8081
    cache_dir: Path = field(default_factory=_cache_dir)
    ram: str | int = "auto"
    disk: str | int = "auto"
    context: int | None = None
    max_tokens: int | None = None
    concurrency: int = 8
    queue: int = 64
    request_timeout: float | None = None
    prefill_chunk: int = 2048
    api_key: tuple[str, ...] = field(default=(), repr=False)  # a repr ends up in logs
    api_keys_file: Path | None = None
    allow_origin: tuple[str, ...] = ()
    insecure: bool = False
    adapter: str | None = None
    kv_bits: int | None = None
    draft_model: str | None = None
    num_draft_tokens: int = 3
    chat_template_args: Mapping[str, Any] = field(default_factory=dict)
    canonicalise: Mapping[str, bool] = field(default_factory=dict)
    no_canonicalise: bool = False
    no_anticipate: bool = False
    trust_remote_code: bool = False
    log_level: LogLevel = "info"
    warm: tuple[Path, ...] = ()
    record: Path | None = None

    def __post_init__(self) -> None:
        read_size(self.ram)
        if self.disk != "off":
            read_size(self.disk)
        if self.adapter is not None and self.model is None:
            raise ConfigError("--adapter needs the model it was made for: add --model PATH|HUB_ID")
        if self.draft_model is not None and self.model is None:
            raise ConfigError("--draft-model needs a model to draft for: add --model PATH|HUB_ID")
        has_key = bool(self.api_key) or self.api_keys_file is not None
        if not (self.insecure or has_key or is_loopback(self.host)):
            raise ConfigError(
                f"--host {self.host} lets other machines in: add --api-key KEY, "
                "or --insecure if that is what you want"
            )

    @property
    def rules(self) -> Mapping[str, bool]:
        """Every rule of canonicalisation, and whether it is on."""
        if self.no_canonicalise:
            return dict.fromkeys(RULES, False)
        return {**RULES, **self.canonicalise}


def is_loopback(host: str) -> bool:
    """Whether `host` reaches this machine only. A name other than localhost counts as outside."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
