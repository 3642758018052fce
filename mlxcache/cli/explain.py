"""`mlxcache explain`: where two requests part and why; what in one is likely to change."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mlxcache.cli import show
from mlxcache.cli.output import reporting
from mlxcache.cli.progress import counting
from mlxcache.cli.target import Json
from mlxcache.config import Settings, load_settings
from mlxcache.errors import BadRequest, MlxcacheError

if TYPE_CHECKING:
    from mlxcache.prompt.builder import PromptBuilder
    from mlxcache.prompt.explain import Explanation, Side


def _file(help: str) -> Any:
    return typer.Argument(metavar="FILE", exists=True, dir_okay=False, allow_dash=True, help=help)


def explain(
    first: Annotated[Path, _file("A chat request as JSON, of either API; - is the input.")],
    second: Annotated[
        Path | None, _file("The request that came after it. Without one: an audit of the first.")
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|HUB_ID",
            show_default=False,
            help="Whose template and tokenizer to use; no weights are read. Default: the settings' "
            "or the built-in demo's, whose counts of tokens are only estimates for other models.",
        ),
    ] = None,
    no_canonicalise: Annotated[
        bool | None,
        typer.Option("--no-canonicalise", metavar="", help="As if the server took no noise out."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell where two requests part, why, and what that costs; or audit one.

    The requests are bodies as clients send them, such as `serve --record DIR` keeps. Needs no
    server.
    """
    with reporting():
        flags = {"model": model, "no_canonicalise": no_canonicalise}
        settings = load_settings(flags, os.environ)
        one, other = read_request(first), second and read_request(second)
        with counting("rendering"):
            found = explain_pair(one, other, settings) if other else audit_one(one, settings)
        if as_json:
            show.print_json(found)
            return
        (print_audit if second is None else print_pair)(found)


def explain_pair(one: dict[str, Any], other: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """What `explain A.json B.json` says, as JSON has it. Raises MlxcacheError."""
    from mlxcache.prompt.explain import Explainer  # noqa: PLC0415
    from mlxcache.wire.chat_bodies import differences_without_effect  # noqa: PLC0415

    builder = _builder(settings)
    sides = _side(builder, one), _side(builder, other)
    found = Explainer(builder.reach, builder.decode).explain(*sides)
    old, new = (len(side.ids) for side in sides)
    return {
        "object": "explanation",
        **_counted(settings),
        "prompt_tokens": {"first": old, "second": new},
        "shared_tokens": found.at_token,
        "new_tokens": new - max(found.at_token, found.new_from),
        "lost": _lost(found),
        "later": [
            {
                "where": one.where,
                "reason": one.reason,
                "cause": one.cause,
                "before": one.before,
                "after": one.after,
            }
            for one in found.later
        ],
        "removed": [
            {
                "rule": rule,
                "where": one.where,
                "cause": one.cause,
                "before": one.before,
                "after": one.after,
            }
            for rule, one in found.removed
        ],
        "without_effect": differences_without_effect(one, other),
    }


def _lost(found: Explanation) -> dict[str, Any] | None:
    if found.reason is None:
        return None
    return {
        "at_token": found.at_token,
        "reason": found.reason,
        "cause": found.cause,
        "where": found.where,
        "lost_tokens": found.lost_tokens,
        "before": found.before,
        "after": found.after,
        "advice": found.advice,
    }


def audit_one(one: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """What `explain A.json` says, as JSON has it. Raises MlxcacheError."""
    from mlxcache.prompt.audit import audit  # noqa: PLC0415

    builder = _builder(settings)
    side = _side(builder, one)
    found = audit(
        side.source,
        builder.position,
        len(side.ids),
        order_kept=settings.rules["tool_order"],
    )
    return {
        "object": "audit",
        **_counted(settings),
        "prompt_tokens": len(side.ids),
        "data": [
            {
                "cause": one.cause,
                "where": one.where,
                "line": one.line,
                "at_token": one.at_token,
                "tokens_behind": one.tokens_behind,
                "text": one.text,
                "excerpt": one.excerpt,
                "rule": one.rule,
                "advice": None if one.rule else one.advice,
            }
            for one in found
        ],
    }


def _counted(settings: Settings) -> dict[str, Any]:
    return {"model": settings.model or "mlxcache-demo", "estimated": settings.model is None}


def _builder(settings: Settings) -> PromptBuilder:
    from mlxcache.model.tokenizer_only import tokenizer_of  # noqa: PLC0415 - transformers, seconds
    from mlxcache.prompt.builder import PromptBuilder  # noqa: PLC0415

    tokenizer = tokenizer_of(settings.model)
    return PromptBuilder(tokenizer, settings.chat_template_args, rules=settings.rules)


def _side(builder: PromptBuilder, request: dict[str, Any]) -> Side:
    from mlxcache.prompt.explain import Side  # noqa: PLC0415
    from mlxcache.wire.chat_bodies import request_to_chat  # noqa: PLC0415

    prompt = builder.chat(request_to_chat(request), "explained")  # rules remember by session
    return Side(prompt.source, prompt.ids)


_EXPECTED = (
    "Expected is the JSON body of a chat request, of OpenAI's chat completions or Anthropic's "
    "messages: an object with a list `messages`, such as `mlxcache serve --record DIR` keeps."
)
_SHOWN_CHARS = 40
_MOST_KEYS = 5

# In the order in which they are looked for.
_OTHERS = (
    ("choices", "as a server's answer has, and not a request"),
    ("error", "as a server's answer has, and not a request"),
    ("input", "as a request of OpenAI's responses API has"),
    ("prompt", "as a text completion has"),
)


def read_request(file: Path) -> dict[str, Any]:
    """The chat request in `file`, or in the input for `-`.

    Raises MlxcacheError, with what was expected and what was found.
    """
    # Here and not above: msgspec and Starlette take a while.
    from mlxcache.wire.chat_bodies import parse_chat_request, request_to_chat  # noqa: PLC0415

    name = "The input" if str(file) == "-" else str(file)
    try:
        raw = typer.get_binary_stream("stdin").read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise MlxcacheError(f"{file} cannot be read: {error.strerror}.") from error
    try:
        request = parse_chat_request(raw)
    except BadRequest as error:
        found = _describe_wrong(raw) or str(error).rstrip(".")
        raise MlxcacheError(f"{name} is no chat request: {found}. {_EXPECTED}") from error
    try:
        request_to_chat(request)
    except BadRequest as error:
        raise MlxcacheError(f"{name} is no chat request that can be rendered: {error}") from error
    return request


def _describe_wrong(raw: bytes) -> str | None:
    """What a file that is no request is, for a person; None where nothing seems wrong."""
    if not raw.strip():
        return "it is empty"
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return f"it is no text, but {len(raw):,} bytes of something else"
    try:
        value = json.loads(text)
    except RecursionError:
        return None
    except ValueError as error:
        lines = _count_values(text)
        if lines > 1:
            return f"it has {lines:,} JSON values, one a line; put one of them into a file"
        return f"it is no JSON ({error}), and begins with {_shortened(text.strip())!r}"
    return _describe_object(value) if isinstance(value, dict) else f"it is {_describe_kind(value)}"


def _describe_object(value: dict[str, Any]) -> str | None:
    if "messages" in value:
        messages = value["messages"]
        if isinstance(messages, list):
            return None if messages else "its `messages` is empty"
        return f"its `messages` is {_describe_kind(messages)}"
    for key, why in _OTHERS:
        if key in value:
            return f"it has `{key}` and no `messages`, {why}"
    for key, below in value.items():
        if isinstance(below, dict) and isinstance(below.get("messages"), list):
            return f"`messages` is below `{_shortened(key)}`; put what is there into a file"
    if not value:
        return "it is an empty object"
    names = ", ".join(f"`{_shortened(key)}`" for key in list(value)[:_MOST_KEYS])
    more = f" and {len(value) - _MOST_KEYS} more" if len(value) > _MOST_KEYS else ""
    return f"it is an object without `messages`, which has {names}{more}"


def _describe_kind(value: object) -> str:
    if isinstance(value, str):
        return f"the JSON text {_shortened(value)!r}"
    if isinstance(value, list):
        return f"a JSON list of {len(value):,}"
    return "a JSON object" if isinstance(value, dict) else f"the JSON value {json.dumps(value)}"


def _count_values(text: str) -> int:
    """How many JSON values there are, one a line; 0 where a line is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        for line in lines:
            json.loads(line)
    except (ValueError, RecursionError):
        return 0
    return len(lines)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


_WIDTH = 80
_EXCERPT = 64
_MOST = 20
"""Findings of an audit that are listed."""

_REASONS = {
    "edited": "history was changed",
    "system_changed": "a system message was changed",
    "tools_changed": "the tools were changed",
    "template_drift": "the same history is rendered differently",
}


def print_pair(found: Mapping[str, Any]) -> None:
    """Two requests: where they part, why, and what to do."""
    out, lost = _console(), found["lost"]
    total = found["prompt_tokens"]["second"]
    if lost is None:
        shared = min(found["shared_tokens"], total)
        out.print(Text("Nothing is lost.", "bold green"))
        out.print(
            f"The second request goes on with the first: {shared:,} tokens are reused, "
            f"{total - shared:,} are new."
        )
    else:
        _print_lost(out, lost, total)
        if found["later"]:
            later = "; ".join(f"{one['where']} ({one['cause']})" for one in found["later"][:5])
            _row(out, "also", Text(later))
    for one in found["removed"]:
        rule = Text.assemble(
            (f"{one['where']}: {one['cause']}, by rule ", ""), (one["rule"], "bold")
        )
        _row(out, "removed", rule)
    if found["without_effect"]:
        _row(out, "no effect", Text(", ".join(found["without_effect"])))
    _counts(out, found)


def _print_lost(out: Console, lost: Mapping[str, Any], total: int) -> None:
    out.print(
        Text.assemble(
            ("Parts", "bold red"),
            f" at token {lost['at_token']:,} of {total:,}: ",
            f"{_REASONS[lost['reason']]}, ",
            (lost["cause"], "bold"),
            ".",
        )
    )
    before, after = _escaped(lost["before"]), _escaped(lost["after"])
    same = _shared_chars(before, after)
    _row(out, "where", Text(lost["where"]))
    most = min(len(before), len(after)) - same
    end = _shared_chars(before[::-1][:most], after[::-1][:most])
    _row(out, "before", _marked(before, same, end, "bold red"))
    _row(out, "now", _marked(after, same, end, "bold green"))
    again = f"{lost['lost_tokens']:,} tokens are computed again"
    _row(out, "lost", Text(again if lost["lost_tokens"] else "nothing that comes again"))
    if lost["lost_tokens"]:
        _row(out, "to do", Text(lost["advice"]))


def print_audit(found: Mapping[str, Any]) -> None:
    """One request: what is likely to change, and what stands behind it."""
    out, total = _console(), found["prompt_tokens"]
    data = [one for one in found["data"] if one["rule"] is None]
    removed = [one for one in found["data"] if one["rule"] is not None]
    if not data:
        out.print(Text("Nothing in it looks as if it would change.", "bold green"))
        out.print(f"{total:,} tokens; tools, system text and reminders were looked at.")
        _print_removed(out, removed)
        _counts(out, found)
        return
    things = "1 thing" if len(data) == 1 else f"{len(data)} things"
    out.print(Text.assemble((things, "bold yellow"), f" likely to change in {total:,} tokens:"))
    for one in data[:_MOST]:
        at = "not rendered" if one["at_token"] is None else f"token {one['at_token']:,}"
        out.print(
            Text.assemble(
                (one["cause"], "bold"),
                f"  {one['where']}, line {one['line']}: {at}, ",
                (f"{one['tokens_behind']:,} tokens behind it", "red"),
            )
        )
        _row(out, "", Text(_escaped(one["excerpt"])[:_EXCERPT], "cyan"))
    if len(data) > _MOST:
        out.print(f"and {len(data) - _MOST} more: --json lists them.")
    for cause in dict.fromkeys(one["cause"] for one in data[:_MOST]):
        advice = next(one["advice"] for one in data if one["cause"] == cause)
        _row(out, "to do", Text.assemble((f"{cause}: ", "bold"), advice))
    _print_removed(out, removed)
    _counts(out, found)


def _print_removed(out: Console, removed: Sequence[Mapping[str, Any]]) -> None:
    for one in removed:
        text = Text.assemble(f"{one['where']}, line {one['line']}, by rule ", (one["rule"], "bold"))
        _row(out, "removed", text)


def _console() -> Console:
    plain = Console(highlight=False, markup=False)
    width = min(_WIDTH, plain.width) if plain.is_terminal else _WIDTH
    return Console(highlight=False, markup=False, width=width)


def _row(out: Console, name: str, text: Text) -> None:
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=9, no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    table.add_row(name, text)
    out.print(Padding(table, (0, 0, 0, 1)))


def _marked(text: str, start: int, end: int, style: str) -> Text:
    """A text that differs from another but for `start` characters in front and `end` behind."""
    shown = Text(text)
    shown.stylize(style, start, len(text) - end)
    return shown[: _EXCERPT * 2]


def _shared_chars(one: str, other: str) -> int:
    """Length of the longest common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _escaped(text: str) -> str:
    """A text on one line, with what is not seen written out."""
    shown = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    shown = shown.replace("\t", "\\t")
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in shown)


def _counts(out: Console, found: Mapping[str, Sequence[Any]]) -> None:
    if found["estimated"]:
        out.print(
            Text(
                "Tokens are the built-in demo's, an estimate: name your model with --model.", "dim"
            )
        )
