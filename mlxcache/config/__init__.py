"""What the server is told: flags, environment, config.toml, defaults, in that order.

Nothing here imports MLX or Starlette. The names that other layers use:
`Settings`, `load_settings`, `Keys`, `read_keys`, `unknown_variables`, `parse_size`, `ram_limit`,
`disk_limit` and `machine_bytes`.
"""

from mlxcache.config.keys import Keys, read_keys
from mlxcache.config.settings import SETTINGS, Settings
from mlxcache.config.sizes import (
    disk_limit,
    explain_auto,
    format_size,
    machine_bytes,
    memory_for,
    parse_size,
    ram_limit,
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
    "load_settings",
    "machine_bytes",
    "memory_for",
    "parse_size",
    "ram_limit",
    "read_keys",
    "unknown_variables",
]
