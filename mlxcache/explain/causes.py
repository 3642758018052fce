"""Causes of prefix losses: patterns of machine-made text that changes, and advice for each cause.

`ANNOUNCED` patterns include the words around a value, so that a version number, a constant or a
commit in a text does not match. `VALUES` are patterns of bare values, used only where two requests
are known to differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:\.\d{1,9})?)?(?: ?[AaPp][Mm])?"
_ZONE = r"(?:Z|[+-]\d{2}:?\d{2}| ?[A-Z]{3,4}\b| \([^()\n]{1,40}\))"
_ISO = rf"\d{{4}}-\d{{2}}-\d{{2}}(?:[T ,]{{1,2}}{_CLOCK}{_ZONE}?)?"
_NUMERIC = rf"\d{{1,4}}[./]\d{{1,2}}[./]\d{{2,4}}(?:,? {_CLOCK})?"
_WORDED = (
    rf"(?:{_DAY},? )?(?:{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?|\d{{1,2}}(?:st|nd|rd|th)? {_MONTH})"
    rf"(?:,? {_CLOCK}{_ZONE}?)?,? \d{{4}}(?:,? (?:at )?{_CLOCK}{_ZONE}?)?"
)
DATE = rf"(?:{_ISO}|{_WORDED}|{_NUMERIC})"
UUID = r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
_EPOCH = r"1[5-9]\d{8}(?:\d{3})?(?:\.\d{1,9})?"
_NUMBER = r"(?<![\d,_.])\d[\d,_]{0,15}(?:\.\d{1,9})?(?!\d)"
_UNITS = r"(?:tokens?|messages?|turns?|steps?|requests?|tool calls?|seconds?|minutes?|credits?)"
_OWNERS = r"(?:session|request|conversation|thread|trace|span|run|turn|message|chat|invocation)"


Shape = tuple[str, re.Pattern[str]]
"""Cause of a prefix loss when a text changes, and its pattern, whose group `value` changes."""


@dataclass(frozen=True, slots=True)
class Found:
    cause: str
    start: int
    end: int


def _shape(cause: str, pattern: str) -> Shape:
    return cause, re.compile(pattern, re.MULTILINE)


ANNOUNCED: tuple[Shape, ...] = (
    _shape("attribution", r"^x-anthropic-billing-header:(?P<value>[^\n]{1,400})"),
    _shape("counter", r"<total_tokens>(?P<value>\d+) tokens left</total_tokens>"),
    _shape(
        "counter",
        r"\b(?i:tokens? us(?:age|ed)|context (?:used|left)|budget)[:=] ?"
        rf"(?P<value>\$?{_NUMBER}(?: ?(?:/|of) ?{_NUMBER})?%?)(?! (?:{_UNITS} )?(?:per|each|at) )",
    ),
    _shape(
        "counter",
        rf"(?P<value>{_NUMBER}%?) (?:more )?(?:{_UNITS}|context)(?: (?:are|is))?"
        r" (?:left|remaining)\b",
    ),
    _shape(
        "counter",
        rf"^[-*# \t]*(?i:{_UNITS} (?:so far|used|count|left|remaining)|(?:remaining|used) {_UNITS}"
        rf"|turn|request|iteration): (?P<value>{_NUMBER})$",
    ),
    _shape("counter", r"\b(?i:turn|step|message|request|iteration) (?P<value>\d+ (?:of|/) \d+)\b"),
    _shape("counter", r"^[-*# \t]*(?i:turn|message|request|iteration) (?P<value>\d+/\d+)\b"),
    _shape("counter", rf"(?i:\bused) (?P<value>{_NUMBER} (?:out )?of {_NUMBER}) {_UNITS}\b"),
    _shape("counter", r"(?i:\bcontext(?: window)?)[:=] ?(?P<value>\d{1,3}%) (?:used|full|left)"),
    _shape("counter", r"^[-*# \t]*(?i:uptime): ?(?P<value>\d[^\n]{0,60})$"),
    _shape(
        "date",
        r"\b(?i:today(?:'s date)?|(?:the )?(?:current|local|system)[ _](?:date|time|datetime)"
        r"(?:[ _]and[ _]time)?|the date is|date and time|it is now|the time is|now)"
        r"(?: is)?(?: now)?[:=]? {1,3}"
        rf"(?P<value>{DATE}|{_CLOCK})",
    ),
    _shape(
        "date",
        r"^[-*# \t]*(?i:(?:date|time|datetime|timestamp|now|(?:session |conversation )?started"
        r"(?: at| on)?|generated(?: at| on)?|last"
        rf" updated|updated at|as of))[:=] {{0,3}}(?P<value>{DATE}|{_EPOCH}|{_CLOCK})",
    ),
    _shape("date", rf"(?i:\bas of) (?P<value>\d{{4}}-\d{{2}}-\d{{2}}[T ]{_CLOCK}{_ZONE}?)"),
    _shape("date", rf"(?i:\bit is)(?: now)? (?P<value>(?={_DAY}){_WORDED})"),
    _shape(
        "date",
        rf"<(?P<tag>(?:current_?)?(?:date|time|datetime|timestamp))>\s*(?P<value>{DATE}|{_EPOCH})\s*"
        r"</(?P=tag)>",
    ),
    _shape(
        "uuid",
        rf"(?i:\b{_OWNERS}[ _-]?(?:id|uuid|key)?)[\"']?[:=/>]? {{0,2}}[\"'`]?(?P<value>{UUID})\b",
    ),
    _shape(
        "uuid",
        r"(?:/private)?/(?:tmp|var/folders|var/tmp|var/scratch|run/user|scratch)/[^\s\"'`<>]{0,160}?"
        rf"(?P<value>{UUID})",
    ),
    _shape("uuid", rf"(?i:scratch(?:pad)?|temp(?:orary)?)\b[^\n]{{0,120}}?/(?P<value>{UUID})\b"),
    _shape(
        "temp_path",
        r"(?:/private)?/(?:tmp|var/folders|var/tmp)/[^\s\"'`<>]{0,120}?"
        r"(?P<value>(?=[\w.-]{0,250}\d)(?=[\w.-]{0,250}[A-Za-z])(?:tmp|T/|[\w-]{1,250}[-_.])"
        r"[A-Za-z0-9_]{6,32})\b",
    ),
    _shape(
        "hash",
        r"\b(?:cch|nonce|etag|cache_bust|request[_-]?hash|session[_-]?hash|build[_-]?hash"
        r"|prompt[_-]?hash)[\"']?[:=] ?[\"']?(?P<value>[0-9a-fA-F]{5,64})\b",
    ),
    _shape(
        "hash",
        rf"(?i:\b{_OWNERS}[ _-]?id)[\"']?[:=] {{0,2}}[\"'`]?(?P<value>(?:req|sess|ses|run|msg|conv"
        r"|thread|trace|chat)?[_-]?(?=[A-Za-z_-]*\d)[0-9A-Za-z]{8,40})\b",
    ),
    _shape(
        "hash",
        rf"(?i:\b{_OWNERS})[\"']?[:=] {{0,2}}[\"'`]?(?P<value>(?:req|sess|ses|run|msg|conv|thread"
        r"|trace|chat)[_-](?=[A-Za-z_-]*\d)[0-9A-Za-z]{8,40})\b",
    ),
    _shape("hash", r"(?i:\btraceparent)[\"']?[:=] ?[\"']?(?P<value>[0-9a-f]{2}-[0-9a-f]{32}-)"),
    _shape("hash", r"(?:\bPID|(?i:\bprocess id))[:=] ?(?P<value>\d{2,7})\b"),
    _shape("git_status", r"\bgitStatus: ?(?P<value>[^\n]{0,400})"),
    _shape("git_status", r'^<context name="gitStatus">[^\n]*\n\n(?P<value>(?:[^<\n][^\n]*\n)+)<'),
    _shape("git_status", r"^[-*# \t]*(?:Current|Git) branch: ?(?P<value>\S{1,200})$"),
    _shape("git_status", r"^Status:\n(?P<value>(?:\(clean\)|(?:[ MADRCTU?!]{2} \S[^\n]*\n?)+))"),
    _shape("git_status", r"^git: Status:\n(?P<value>(?:git: [^\n]*\n?)+)"),
    _shape("git_status", r"^Recent commits:\n(?P<value>(?:[0-9a-f]{7,40} [^\n]*\n?)+)"),
    _shape(
        "git_status",
        r"^[-*# \t]*(?:HEAD is (?:now )?at|(?:Current|Last|Latest|HEAD) commit:?)"
        r" (?P<value>[0-9a-f]{7,40})\b",
    ),
    _shape("git_status", r"^[-*# \t]*Branch: (?P<value>\S{1,200} \((?:ahead|behind) \d[^)\n]*\))"),
    _shape("git_status", r"^On branch (?P<value>\S{1,200})$"),
)

VALUES: tuple[Shape, ...] = (
    _shape("uuid", rf"(?P<value>{UUID})"),
    _shape("date", rf"(?P<value>{DATE})"),
    _shape("date", r"(?P<value>\b\d{1,2}:\d{2}:\d{2}\b)"),
    _shape("date", rf"(?P<value>\b{_EPOCH}\b)"),
    _shape("version", r"(?P<value>\bv?\d+\.\d+\.\d+[\w.+-]*)"),
    _shape("hash", r"(?P<value>\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,64}\b)"),
    _shape("temp_path", r"(?P<value>(?:/private)?/(?:tmp|var/folders|var/tmp)/[^\s\"'`<>]+)"),
)


def find_announced(text: str) -> Iterator[Found]:
    """Yield the matches of `ANNOUNCED` in a text, of those that overlap the first or longest."""
    found = sorted(_all(ANNOUNCED, text), key=lambda one: (one.start, -one.end))
    end = 0
    for one in found:
        if one.start >= end:
            yield one
            end = max(end, one.end)


def causes_touching(shapes: tuple[Shape, ...], text: str, start: int, end: int) -> list[str]:
    """Return the causes of the matches whose `value` overlaps or touches [start, end)."""
    return [
        one.cause
        for one in _all(shapes, text)
        if one.start < max(end, start + 1) and one.end > min(start, end - 1)
    ]


def _all(shapes: tuple[Shape, ...], text: str) -> Iterator[Found]:
    for cause, pattern in shapes:
        for match in pattern.finditer(text):
            yield Found(cause, *match.span("value"))


# -- advice ------------------------------------------------------------------------------------

_UNCHANGED = "Send old messages unchanged."

COMPARE = "To see both requests, serve with --record DIR and run mlxcache explain."
"""Added for a cause that does not tell what changed; `mlxcache explain` itself shows it."""

ADVICE: dict[str, str] = {
    "attribution": "Set CLAUDE_CODE_ATTRIBUTION_HEADER=0 for the client, or leave "
    "canonicalisation on (no --no-canonicalise).",
    "counter": "The rule counter removes Claude Code's. Have the client leave out others, or put "
    "them after the last user message.",
    "date": "Put it into the newest message. A day without the time changes only once a day.",
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
