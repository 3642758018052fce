"""Rule `attribution`: remove the billing header line of Claude Code's system prompt."""

from __future__ import annotations

import re

from mlxcache.prompt.canonical.draft import Draft

_PAIR = r" {0,4}cc[a-z_]{0,40}=[^\s;=]{0,200}"
LINE = re.compile(
    rf"x-anthropic-billing-header:(?:(?:{_PAIR};)*{_PAIR};?[ \t]*(?:(?:\r?\n)+|\Z)"
    rf"|(?:{_PAIR};)+ (?!cc[a-z_]*=)(?=\S[^\r\n]*\Z))"
)
"""The whole attribution line, only `key=value` pairs, with the line ends after it.

For example `x-anthropic-billing-header: cc_version=2.1.329.0a8; cc_entrypoint=cli; cch=36ee5;`. In
a system prompt that is one line, as anyclaude sends it, the pairs end before a space.
"""


def apply(draft: Draft) -> bool:
    """Remove Claude Code's line `x-anthropic-billing-header: ...` from leading system messages.

    Returns whether there was one.
    """
    found = False
    for at in reversed(range(draft.leading())):
        match = LINE.match(draft.text(at))
        if match:
            draft.rewrite(at, draft.text(at)[match.end() :])
            found = True
    return found
