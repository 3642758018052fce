"""Advice on lost prefixes, by cause."""

from __future__ import annotations

_RENDERED = "Compare the two with mlxcache explain; a message that was sent is best sent unchanged."

ADVICE: dict[str, str] = {
    "attribution": "Set CLAUDE_CODE_ATTRIBUTION_HEADER=0 for the client, or leave "
    "canonicalisation on (no --no-canonicalise).",
    "counter": "The rule counter drops Claude Code's. Have the client leave any other out, or put "
    "it behind the last user message.",
    "date": "Put it into the newest message, or else give the day and not the time of day.",
    "uuid": "The rule uuid knows those in paths of scratch folders. Have the client leave others "
    "out, or use one for all sessions.",
    "temp_path": "Use a folder with a fixed name, not one that is made anew for each session.",
    "hash": "Leave ids and hashes of a request or session out of the system text.",
    "git_status": "Turn the git status off in the client (Claude Code: includeGitInstructions "
    "false in settings.json). In a system prompt, --canonicalise git_status=on helps too.",
    "version": "The client was updated, or names a version that changes; nothing is to be done.",
    "tool_inserted": "Load all tools from the start, put new ones last, or let the client defer "
    "them (tool search).",
    "tool_removed": "Keep the list of tools as it is for the whole session.",
    "tool_reordered": "Send tools in one order, such as by name.",
    "tool_order": "Tools are not in the order of their names. If the client's order is always the "
    "same, nothing is to be done.",
    "tool_changed": "Keep descriptions and schemas of tools the same for the whole session.",
    "template_args": "Send the same template arguments (thinking, reasoning effort) in each turn.",
    "thinking_dropped": "The template or the client leaves thinking out of history. Send it "
    "back, or leave anticipation on: what follows is then computed ahead.",
    "thinking_changed": "Send thinking back as it came.",
    "rerendered": "The model's chat template writes history differently than it was generated. "
    "Nothing in the client is at fault.",
    "tool_calls": "Send tool calls back with the names and arguments they came with.",
    "tool_result_cleared": "The client cleared old results to save context; turn that off, or have "
    "it done rarely and much at once.",
    "compaction": "The client summarised the history: that is computed once. A longer --context "
    "puts it off.",
    "message_inserted": "Put what is new behind the last message, not between old ones.",
    "message_dropped": "Keep old messages, or drop many at once and rarely.",
    "rewound": "The conversation was taken back to an earlier message. Nothing is to be done.",
    "image": "Send an image with the same bytes each time.",
    "whitespace": "Send old messages with the same blanks and line ends.",
    "line_endings": "Send old messages with the same line ends.",
    "unicode_normalisation": "Send old messages in the Unicode form they came in.",
    "text": _RENDERED,
    "new_conversation": "Nothing like it was seen before. mlxcache warm computes it ahead of use.",
    "memory": "Neither tier holds it any more: give more with --ram or --disk, or pin the session.",
    "no_checkpoint": "The model's state cannot be cut there. It is computed once more from "
    "the last checkpoint.",
    "checksum": "A file of it is damaged and was set aside: look at the disk, and run "
    "mlxcache cache check.",
    "other_model": "It was computed by another model or version, whose KV cannot be used.",
}
"""One or two sentences per cause; other causes get a general one."""


def advice_for(cause: str) -> str:
    """Advice for a prefix lost by `cause`."""
    return ADVICE.get(cause, _RENDERED)
