"""Table of the canonicalisation rules, in words for users; also in `docs/canonicalisation.md`."""

from __future__ import annotations

from dataclasses import dataclass

CLAUDE_CODE = "Claude Code"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: the form of the text it matches, the clients that send it, and the effect."""

    name: str
    shape: str
    seen: str
    does: str


TABLE = (
    Rule(
        "attribution",
        "`x-anthropic-billing-header: cc_version=...; cc_entrypoint=cli; cch=36ee5;` (`key=value` "
        "pairs only) as the first line of a system message at the start of the conversation",
        f"{CLAUDE_CODE} 2.1.37 to 2.1.330",
        "removes the line",
    ),
    Rule(
        "counter",
        "`<total_tokens>N tokens left</total_tokens>` on separate lines at the end of a system "
        "message, as its first paragraph, or as the whole message; between turns, as any paragraph",
        f"{CLAUDE_CODE} up to 2.1.330",
        "removes the counter",
    ),
    Rule(
        "newest_counter",
        "as `counter`",
        f"{CLAUDE_CODE} up to 2.1.330",
        "moves the newest counter to the end of the prompt and removes the others",
    ),
    Rule(
        "environment",
        "a system message directly after the first message and before the first reply. It begins "
        "with `# Environment` and `You have been invoked in the following environment:`, with a "
        "list of deferred tools, agents or skills in the client's words, or with the output of a "
        "`SessionStart` hook or `Called the Read tool ...` (or `Bash`) followed by one of these. "
        "It ends with such a list, with the text after the list of agents, with `You are powered "
        "by ...` or with `Today's date is ...`",
        f"{CLAUDE_CODE} 2.1.160 to 2.1.330",
        "moves it before that message, after the tools. Files that were read, and all text from "
        "`Plan mode is active` or the output of a `UserPromptSubmit` hook on, stay in place",
    ),
    Rule(
        "uuid",
        "a lower-case UUID that is a whole segment of a path with a segment `tmp`, `temp`, `T`, "
        "`scratch` or `scratchpad`, in a system message before the first reply",
        f"{CLAUDE_CODE} 2.1.100 to 2.1.329",
        "replaces it by a stable UUID for the model; the client reads and writes its own",
    ),
    Rule(
        "git_status",
        "a line `gitStatus: ...` and the lines of the status after it (branch, user, files, "
        "commits), in a system message before the first reply",
        f"{CLAUDE_CODE} up to 2.1.329, and clients derived from it",
        "moves it to a system message after the message with which it was new",
    ),
    Rule(
        "tool_order",
        "the same tools as in an earlier request, in another order",
        "no client yet; expected of clients that list the tools of MCP servers in the order in "
        "which the servers answer",
        "restores the order of the first request",
    ),
    Rule(
        "argument_order",
        "the arguments of a call with equal values in another form: keys in another order, `1` for "
        "`1.0`",
        "no client yet; expected of clients whose JSON library sorts keys, as in Go and Rust",
        "restores the form that the model wrote",
    ),
    Rule(
        "cleared_results",
        "`[Old tool result content cleared]` as the whole result of a tool, where this server saw "
        "the result in the same place of the same conversation",
        f"{CLAUDE_CODE} since 2.0, Qwen Code",
        "restores the result, if the prompt then takes at most three quarters of the context",
    ),
    Rule(
        "thinking",
        "a reply without its thinking, where this server generated it in the same place of the "
        "same conversation, with the same text and calls",
        "most clients of chat completions",
        "gives the thinking to the template, which keeps or drops it, if the prompt then takes at "
        "most three quarters of the context",
    ),
    Rule(
        "replay",
        "a reply with the content that this server generated for the same prompt, in any form: "
        "JSON with other blanks or order of keys, other white space at its ends",
        "all clients",
        "uses the tokens that the model generated",
    ),
)
"""In the order in which they are applied."""
