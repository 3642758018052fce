"""Model server for coding agents that keeps the KV of each conversation for reuse."""

__version__ = "0.1.0"
