"""The rules as users read them; `docs/canonicalisation.md` shows this table."""

from __future__ import annotations

from dataclasses import dataclass

CLAUDE_CODE = "Claude Code"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: the shape that it looks for, where that was seen, and what it does."""

    name: str
    shape: str
    seen: str
    does: str


TABLE = (
    Rule(
        "attribution",
        "`x-anthropic-billing-header: cc_version=...; cc_entrypoint=cli; cch=36ee5;`, `key=value` "
        "pairs alone, as the first line of a system message in front of the conversation",
        f"{CLAUDE_CODE} 2.1.37 to 2.1.330",
        "dropped",
    ),
    Rule(
        "counter",
        "`<total_tokens>N tokens left</total_tokens>` in lines of their own at the end of a system "
        "message, as its first paragraph, or as all of it; between turns as any paragraph",
        f"{CLAUDE_CODE} up to 2.1.330",
        "dropped",
    ),
    Rule(
        "newest_counter",
        "as `counter`",
        f"{CLAUDE_CODE} up to 2.1.330",
        "the newest stands at the end of the prompt, the others are dropped",
    ),
    Rule(
        "environment",
        "a system message right behind the first message, before the first reply: it begins with "
        "`# Environment` and `You have been invoked in the following environment:`, with a list "
        "of deferred tools, of agents or of skills in the client's words, or with what a "
        "`SessionStart` hook said or `Called the Read tool ...` (or `Bash`) and one of these; it "
        "ends with such a list, with what is said behind agents, with `You are powered by ...` or "
        "`Today's date is ...`",
        f"{CLAUDE_CODE} 2.1.160 to 2.1.330",
        "stands before that message, behind the tools; what was read, and all from `Plan mode is "
        "active` or what a `UserPromptSubmit` hook said, stays where it is",
    ),
    Rule(
        "uuid",
        "a UUID in lower case that is a whole segment of a path with a segment `tmp`, `temp`, `T`, "
        "`scratch` or `scratchpad`, in a system message before the first reply",
        f"{CLAUDE_CODE} 2.1.100 to 2.1.329",
        "the model reads and writes a stable UUID, the client its own",
    ),
    Rule(
        "git_status",
        "a line `gitStatus: ...` and the lines of the status behind it (branch, user, files, "
        "commits), in a system message before the first reply",
        f"{CLAUDE_CODE} up to 2.1.329, and clients made like it",
        "stands as a system message behind the message with which it was new",
    ),
    Rule(
        "tool_order",
        "the very same tools as in an earlier request, in another order",
        "nowhere yet; expected of clients that list the tools of MCP servers as these answer",
        "the order of the first request",
    ),
    Rule(
        "argument_order",
        "the arguments of a call with the same values and other formatting: keys in another order, "
        "`1` for `1.0`",
        "nowhere yet; expected of clients whose JSON library sorts keys, as in Go and Rust",
        "as the model wrote them",
    ),
    Rule(
        "cleared_results",
        "`[Old tool result content cleared]` as all of a tool's result, where this server saw the "
        "result in the same place of the same conversation",
        f"{CLAUDE_CODE} since 2.0, Qwen Code",
        "the result as it was, as long as the prompt takes at most three quarters of the context",
    ),
    Rule(
        "thinking",
        "a reply without its thinking, where this server wrote it in the same place of the same "
        "conversation, with the same text and calls",
        "most clients of chat completions",
        "the template is given the thinking, and keeps it or not; as long as the prompt takes at "
        "most three quarters of the context",
    ),
    Rule(
        "replay",
        "a reply that says what this server wrote to the same prompt, in any form: JSON with other "
        "blanks or order of keys, white space at its ends",
        "all clients",
        "the very tokens that the model wrote",
    ),
)
"""In the order in which they are applied."""
