"""The flags of `mlxcache serve`.

All are read as text and checked by `mlxcache.config`, so that a flag, its environment variable
and its key in config.toml are held to the same rules and fail with the same sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

MODEL, MEMORY, SERVER, OTHER = "Model", "Memory and speed", "Server", "Other"


def _value(panel: str, metavar: str, help: str, default: str | None = None) -> Any:
    if default is not None:
        help += f" Default: {default}."
    return typer.Option(metavar=metavar, help=help, show_default=False, rich_help_panel=panel)


def _switch(name: str, panel: str, help: str) -> Any:
    return typer.Option(name, metavar="", help=help, show_default=False, rich_help_panel=panel)


Model = Annotated[
    str | None,
    _value(
        MODEL,
        "PATH|HUB_ID",
        "A model's folder, or its id on the Hugging Face Hub.",
        "a built-in demo",
    ),
]
Adapter = Annotated[str | None, _value(MODEL, "PATH", "The folder of a LoRA adapter.")]
DraftModel = Annotated[
    str | None,
    _value(
        MODEL,
        "PATH|HUB_ID",
        "A small model with the same tokenizer, which drafts the other's tokens.",
    ),
]
NumDraftTokens = Annotated[
    str | None, _value(MODEL, "N", "Tokens that the draft model drafts at once.", "3")
]
TemplateArgs = Annotated[
    str | None,
    _value(MODEL, "JSON", "For the chat template, such as '{\"enable_thinking\": false}'."),
]
TrustRemoteCode = Annotated[
    bool | None,
    _switch("--trust-remote-code", MODEL, "Let the model's folder run its own Python code."),
]
Ram = Annotated[
    str | None,
    _value(
        MEMORY,
        "SIZE|PERCENT|auto",
        "All memory beside the weights: 8GB, 25%, auto. A bare number is bytes.",
        "auto",
    ),
]
Disk = Annotated[
    str | None,
    _value(
        MEMORY,
        "SIZE|PERCENT|auto|off",
        "Most that conversations may take on disk: 50GB, 10%, auto, off.",
        "auto",
    ),
]
Context = Annotated[
    str | None,
    _value(MEMORY, "N", "Tokens in a prompt and its reply together.", "the model's own"),
]
MaxTokens = Annotated[
    str | None,
    _value(MEMORY, "N", "Reply tokens where a request names none.", "what the context leaves"),
]
Concurrency = Annotated[str | None, _value(MEMORY, "N", "Requests computed at once.", "8")]
Queue = Annotated[
    str | None, _value(MEMORY, "N", "Requests that may wait; then the answer is 503.", "64")
]
RequestTimeout = Annotated[
    str | None,
    _value(MEMORY, "SECONDS", "Most that a request may take, queue and all.", "any time"),
]
PrefillChunk = Annotated[
    str | None, _value(MEMORY, "N", "Most prompt tokens computed in one step.", "2048")
]
KvBits = Annotated[
    str | None,
    _value(MEMORY, "4|8", "Keys and values in 4 or 8 bits each.", "as the model computes them"),
]
Warm = Annotated[
    list[str] | None,
    _value(
        MEMORY,
        "FILE",
        "Compute a chat request or a system prompt at the start; may be given several times.",
    ),
]
NoAnticipate = Annotated[
    bool | None,
    _switch("--no-anticipate", MEMORY, "Compute nothing ahead of the next turn between requests."),
]
Host = Annotated[str | None, _value(SERVER, "HOST", "The address to listen on.", "127.0.0.1")]
Port = Annotated[
    str | None, _value(SERVER, "PORT", "The port to listen on; 0 picks a free one.", "8081")
]
ApiKey = Annotated[
    list[str] | None,
    _value(
        SERVER,
        "KEY",
        "Ask every client for this key. Safer in MLXCACHE_API_KEY than here. Given several times, "
        "each key has sessions of its own.",
    ),
]
ApiKeysFile = Annotated[
    str | None,
    _value(
        SERVER, "FILE", "Keys, each with sessions of its own: a line for each, KEY or NAME:KEY."
    ),
]
AllowOrigin = Annotated[
    list[str] | None,
    _value(
        SERVER,
        "ORIGIN",
        "Let web pages of this origin in, such as http://localhost:3000; may be repeated.",
    ),
]
Insecure = Annotated[
    bool | None, _switch("--insecure", SERVER, "Listen beyond this machine without a key.")
]
CacheDir = Annotated[
    str | None, _value(OTHER, "DIR", "Where the server keeps its files.", "the user's cache folder")
]
LogLevel = Annotated[
    str | None,
    _value(OTHER, "LEVEL", "debug, info, warning or error; requests are logged with info.", "info"),
]
Record = Annotated[
    str | None,
    _value(
        OTHER,
        "DIR",
        "Keep the bodies of chat requests there, for mlxcache explain: all that was said.",
    ),
]
Config = Annotated[
    Path | None,
    _value(
        OTHER,
        "FILE",
        "Settings in TOML; flags and variables win over it.",
        "config.toml in the user's configuration folder",
    ),
]
Canonicalise = Annotated[
    list[str] | None,
    _value(OTHER, "RULE=on|off", "Switch a rule of canonicalisation; may be repeated."),
]
NoCanonicalise = Annotated[
    bool | None,
    _switch("--no-canonicalise", OTHER, "Render requests word for word, noise and all."),
]
