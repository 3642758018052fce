"""The safetensors format, defined where the model layer can import it too."""

from mlxcache.safetensors import (
    MAX_HEADER,
    Header,
    Malformed,
    Place,
    compose,
    parse,
    read_foreign_header,
    read_header,
)

__all__ = [
    "MAX_HEADER",
    "Header",
    "Malformed",
    "Place",
    "compose",
    "parse",
    "read_foreign_header",
    "read_header",
]
