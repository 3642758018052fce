"""Settings of the server, and the limits that they amount to on this machine.

Settings come from flags, environment variables, config.toml and defaults, in that order of
precedence; `settings` has one entry for each. `memory` reads what the operating system
reports about memory. Of the project's modules, this package imports only `errors`; it imports
neither MLX nor Starlette.
"""

from mlxcache.config.keys import Keys, read_keys
from mlxcache.config.settings import SETTINGS, Settings
from mlxcache.config.sizes import (
    disk_limit,
    explain_auto,
    format_size,
    left_to_system,
    machine_bytes,
    memory_for,
    parse_size,
    ram_limit,
    require_memory,
    wired_size,
)
from mlxcache.config.sources import default_config_path, load_settings, unknown_variables

__all__ = [
    "SETTINGS",
    "Keys",
    "Settings",
    "default_config_path",
    "disk_limit",
    "explain_auto",
    "format_size",
    "left_to_system",
    "load_settings",
    "machine_bytes",
    "memory_for",
    "parse_size",
    "ram_limit",
    "read_keys",
    "require_memory",
    "unknown_variables",
    "wired_size",
]
