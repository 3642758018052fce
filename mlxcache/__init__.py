"""Model server for coding agents that keeps the KV of each conversation for reuse."""

from mlxcache.command_buffers import set_command_buffers

__version__ = "0.1.0"

set_command_buffers()  # here, because MLX reads the variables when any module imports it
