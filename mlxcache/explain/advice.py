"""Advice to the user on prefixes that were not reused, for each cause of a prefix loss."""

from __future__ import annotations

_UNCHANGED = "Send old messages unchanged."

COMPARE = "To see both requests, serve with --record DIR and run mlxcache explain."
"""Added for a cause that does not tell what changed; `mlxcache explain` itself shows it."""

ADVICE: dict[str, str] = {
    "attribution": "Set CLAUDE_CODE_ATTRIBUTION_HEADER=0 for the client, or leave "
    "canonicalisation on (no --no-canonicalise).",
    "counter": "The rule counter removes Claude Code's. Have the client leave out others, or put "
    "them after the last user message.",
    "date": "Put it into the newest message, or use the day without the time.",
    "uuid": "The rule uuid replaces UUIDs in paths of scratch folders. Have the client leave out "
    "others, or use one for all sessions.",
    "temp_path": "Use a folder with a fixed name for all sessions.",
    "hash": "Leave ids and hashes of a request or session out of the system text.",
    "git_status": "Turn the git status off in the client (Claude Code: "
    "CLAUDE_CODE_DISABLE_GIT_INSTRUCTIONS=1). In a system prompt, --canonicalise git_status=on "
    "helps too.",
    "version": "The client was updated, or sends a version that changes. No action is needed.",
    "tool_inserted": "Load all tools from the start, put new ones last, or let the client defer "
    "them (tool search).",
    "tool_removed": "Keep the list of tools unchanged for the whole session.",
    "tool_reordered": "Send tools always in the same order, for example by name.",
    "tool_order": "Tools are not sorted by name. If the client's order is always the same, no "
    "action is needed.",
    "tool_changed": "Keep descriptions and schemas of tools unchanged for the whole session.",
    "template_args": "Send the same template arguments (thinking, reasoning effort) in each turn.",
    "thinking_dropped": "The template or the client leaves thinking out of the history. Send "
    "it back, or leave anticipation on: the changed part is then computed while idle.",
    "thinking_changed": "Send thinking back unchanged.",
    "rerendered": "The model's chat template renders the history differently than it was "
    "generated. The client is not the cause.",
    "tool_calls": "Send tool calls back with unchanged names and arguments.",
    "tool_result_cleared": "The client cleared old results to save context. Turn that off, or have "
    "it clear many results at once, rarely.",
    "compaction": "The client summarised the history, which is computed once. A longer --context "
    "delays it.",
    "message_inserted": "Add new messages after the last one, not between old ones.",
    "history_inserted": "The client sends this text after the history (a sub-agent's instruction, "
    "or files), so newer history comes before it. This cannot be avoided: it is computed again in "
    "each such request. No action is needed.",
    "reminder_moved": "The client writes this text (a reminder, rules) into the newest message "
    "alone and takes it out of older ones, so what came after it is computed again. This cannot be "
    "avoided. No action is needed.",
    "message_dropped": "Keep old messages, or drop many at once, rarely.",
    "rewound": "The conversation was taken back to an earlier message. No action is needed.",
    "image": "Send an image with the same bytes in each turn.",
    "whitespace": "Send old messages with the same blanks and line ends.",
    "line_endings": "Send old messages with the same line ends.",
    "unicode_normalisation": "Send old messages in the Unicode form they came in.",
    "text": _UNCHANGED,
    "new_conversation": "There was no similar prompt. mlxcache warm computes one in advance.",
    "memory": "It was evicted from RAM and disk: raise --ram or --disk, or pin the session.",
    "no_checkpoint": "The model's state cannot be cut there. It is computed again from the "
    "last checkpoint.",
    "checksum": "A file with its KV is damaged and was quarantined. Check the disk, and run "
    "mlxcache cache check.",
    "other_model": "It was computed by another model or version, whose KV cannot be used.",
}
"""Advice of one or two sentences by cause; other causes get a general one."""

_OTHER_SYSTEM = (
    "Sessions in a terminal, sessions with -p or exec, and agents have different system prompts; "
    "each of these is computed once. Within one session, send the system prompt unchanged."
)


def advice_for(cause: str, reason: str = "") -> str:
    if (reason, cause) == ("system_changed", "text"):
        return _OTHER_SYSTEM
    return ADVICE.get(cause, _UNCHANGED)
