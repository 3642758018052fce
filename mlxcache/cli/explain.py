"""`mlxcache explain`: compare two requests, or audit one for parts likely to change.

Requests are read from files. Their prompts are rendered with the tokenizer; no weights are needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mlxcache.cli.options import ApiKey, Json, Url, find_server, read_input
from mlxcache.cli.output import count_bar, narrow_console
from mlxcache.cli.show import Result, format_age, format_count
from mlxcache.config import Settings, load_settings
from mlxcache.config.flags import argument, option, switch
from mlxcache.errors import BadRequest, ConfigError, MlxcacheError, ModelError, NotFound
from mlxcache.utf8 import NotUtf8, decode_utf8

if TYPE_CHECKING:
    from mlxcache.cli.remote import Remote
    from mlxcache.prompt.builder import PromptBuilder
    from mlxcache.prompt.chat_prompt import ChatPrompt

_EXPECTED = (
    "Expected the JSON body of a chat request, of OpenAI's chat completions or Anthropic's "
    "messages: an object with a list `messages`, or of OpenAI's responses: an object with `input`, "
    "such as `mlxcache serve --record DIR` writes."
)
_SHOWN_CHARS = 40
_MAX_KEYS = 5

# Checked in this order.
_OTHER_BODIES = (
    ("choices", "like a server's response"),
    ("error", "like a server's response"),
    ("prompt", "like a text completion request"),
)

_EXCERPT = 64
_MAX_FINDINGS = 20
_MAX_LOSSES = 5

_REASONS = {
    "edited": "history was changed",
    "moved": "text that is sent again is now behind newer history",
    "system_changed": "a system message was changed",
    "tools_changed": "the tools were changed",
    "template_drift": "the same history is rendered differently",
}


def _file(help: str) -> Any:
    return argument("FILE", help, exists=True, dir_okay=False, allow_dash=True)


def explain(
    first: Annotated[
        Path | None,
        argument(
            "FILE|SESSION",
            "A chat request of any API as JSON; - reads standard input. A session's id: what "
            "its last requests lost. Omitted: the last request that lost something.",
        ),
    ] = None,
    second: Annotated[
        Path | None, _file("The request that followed it. Omitted: audit the first.")
    ] = None,
    *,
    model: Annotated[
        str | None,
        option(
            "PATH|HUB_ID",
            "Model whose chat template and tokenizer to use; no weights are read. Default: "
            "the configured model, else the built-in demo, whose token counts are estimates.",
            show_default=False,
        ),
    ] = None,
    no_canonicalise: Annotated[
        bool | None,
        switch("Apply no canonicalisation rules.", "--no-canonicalise"),
    ] = None,
    as_json: Json = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> Result:
    """Explain where two requests differ, why, and what that costs; or audit one request.

    The files are bodies of chat requests, as `serve --record DIR` writes them. A server is needed
    for a body with `previous_response_id`, whose earlier part of the conversation is read from it,
    and for what the requests of a session lost.
    """
    if first is None or (first.name.startswith("ses_") and not first.exists()):
        return explain_losses(find_server(url, api_key), None if first is None else first.name)
    if str(first) != "-" and not first.exists():
        raise ConfigError(f"there is no file {str(first)!r}")
    flags = {"model": model, "no_canonicalise": no_canonicalise}
    settings = load_settings(flags, os.environ)
    server = partial(find_server, url, api_key)
    one, other = read_request(first, server), second and read_request(second, server)
    named = (other or one).get("model")
    settings = settings.for_request(named if isinstance(named, str) else None)
    with count_bar("rendering"):
        found = explain_pair(one, other, settings) if other else audit_one(one, settings)
    text = partial(print_audit if second is None else print_pair, found)
    return Result(found, text)


def explain_losses(server: Remote, session: str | None) -> Result:
    """Explain the last losses of a session, or the last one of all requests."""
    lost = [one for one in server.requests(1000) if one["lost"] and one["lost"]["lost_tokens"]]
    if session is None:
        found = lost[:1]
    else:
        own = (session, server.session(session)["label"])
        found = [one for one in lost if one["session"] in own][:_MAX_LOSSES]
    return Result({"object": "list", "data": found}, partial(_print_losses, found))


def _print_losses(found: Sequence[Mapping[str, Any]]) -> None:
    out = narrow_console()
    if not found:
        out.print("Nothing was lost by the requests that the server remembers.")
    for one in found:
        age, lost = format_age(one["created_at"]), one["lost"]
        out.print(f"{one['id']}, session {one['session'] or '-'}, {age}")
        _print_lost(out, lost, one["prompt_tokens"])


def explain_pair(one: dict[str, Any], other: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Compare a chat request with a later one; return the object of `explain --json`."""
    from mlxcache.explain.compare import compare_prompts  # noqa: PLC0415
    from mlxcache.wire.chat_bodies import (  # noqa: PLC0415
        count_images,
        differences_without_effect,
    )

    builder = make_builder(settings)
    prompts = _prompt(builder, one), _prompt(builder, other)
    explained = compare_prompts(builder, *prompts)
    old, new = (len(prompt.ids) for prompt in prompts)
    lost: dict[str, Any] | None = None
    if explained.first is not None:
        lost = _members(explained.first, "reason", "cause", "where", "before", "after")
    elif not explained.related:
        lost = {"reason": "first_seen", "cause": "new_conversation"}
        lost |= dict.fromkeys(("where", "before", "after"), "")
    if lost is not None:
        lost |= _members(explained, "lost_tokens", "advice")
    return {
        "object": "explanation",
        **_model_object(settings),
        "prompt_tokens": {"first": old, "second": new},
        "images": {"first": count_images(one), "second": count_images(other)},
        "shared_tokens": explained.at_token,
        "new_tokens": new - explained.at_token - explained.lost_tokens,
        "lost": None if lost is None else {"at_token": explained.at_token, **lost},
        "later": [
            _members(one, "where", "reason", "cause", "before", "after") for one in explained.later
        ],
        "removed": [
            {"rule": rule, **_members(one, "where", "cause", "before", "after")}
            for rule, one in explained.removed
        ],
        "without_effect": differences_without_effect(one, other),
    }


def _members(found: object, *names: str) -> dict[str, Any]:
    return {name: getattr(found, name) for name in names}


def audit_one(one: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """List the parts of a chat request that are likely to change, as `explain --json` does."""
    from mlxcache.explain.audit import audit  # noqa: PLC0415
    from mlxcache.wire.chat_bodies import count_images  # noqa: PLC0415

    builder = make_builder(settings)
    prompt = _prompt(builder, one)
    found = audit(builder, prompt)
    return {
        "object": "audit",
        **_model_object(settings),
        "prompt_tokens": len(prompt.ids),
        "images": count_images(one),
        "data": [
            {
                **_members(one, "cause", "where", "line", "at_token", "tokens_behind"),
                **_members(one, "text", "excerpt", "rule"),
                "advice": None if one.rule else one.advice,
            }
            for one in found
        ],
    }


def _model_object(settings: Settings) -> dict[str, Any]:
    """Describe the model; `backend` and `takes_images` are None if its files are not here."""
    from mlxcache.model.hub import here  # noqa: PLC0415 - as below
    from mlxcache.model.load import ModelSpec, abilities  # noqa: PLC0415 - transformers, seconds

    found = {"model": settings.model or "mlxcache-demo", "estimated": settings.model is None}
    backend, takes_images = ("mlx-lm", False) if settings.model is None else (None, None)
    path = None if settings.model is None else here(settings.model)
    if settings.model is not None and path is not None:
        spec = ModelSpec(settings.model, adapter=settings.adapter, images=settings.feeds_images)
        with suppress(ModelError):
            backend, takes_images = abilities(spec, path)
    return found | {"backend": backend, "takes_images": takes_images}


def make_builder(settings: Settings) -> PromptBuilder:
    from mlxcache.model.load import tokenizer_of  # noqa: PLC0415 - transformers, seconds
    from mlxcache.prompt.builder import PromptBuilder  # noqa: PLC0415

    tokenizer = tokenizer_of(settings.model)
    return PromptBuilder(tokenizer, settings.chat_template_args, rules=settings.rules)


def _prompt(builder: PromptBuilder, request: dict[str, Any]) -> ChatPrompt:
    from mlxcache.wire.chat_bodies import request_to_chat  # noqa: PLC0415

    return builder.chat(request_to_chat(request), "explained")  # rules remember by session


def read_request(file: Path, server: Callable[[], Remote]) -> dict[str, Any]:
    """Read a chat request from `file`, or raise MlxcacheError, which says what it has instead.

    `server` is called only for a request that continues a stored response: the conversation before
    it is then read from there.
    """
    # Here and not above: importing msgspec takes a while, and --help needs none of it.
    from mlxcache.wire.chat_bodies import (  # noqa: PLC0415
        is_responses,
        parse_chat_request,
        request_to_chat,
    )

    name = "Standard input" if str(file) == "-" else str(file)
    raw = read_input(file)
    try:
        request = parse_chat_request(raw)
    except BadRequest as error:
        found = _describe_wrong(raw) or str(error).rstrip(".")
        raise MlxcacheError(f"{name} is not a chat request: {found}. {_EXPECTED}") from error
    if is_responses(request) and request.get("previous_response_id"):
        request = _with_history(request, name, server)
    try:
        request_to_chat(request)
    except BadRequest as error:
        raise MlxcacheError(f"{name} is a chat request that cannot be rendered: {error}") from error
    return request


def _with_history(
    request: Mapping[str, Any], name: str, server: Callable[[], Remote]
) -> dict[str, Any]:
    """Put the conversation that a request of the Responses API continues before its `input`."""
    from mlxcache.cli.remote import NoServer  # noqa: PLC0415 - takes 50 ms

    previous = str(request["previous_response_id"])
    continues = f"{name} has only its new items: it continues the response {previous}"
    try:
        history = server().response_items(previous)
    except NoServer as error:
        raise MlxcacheError(f"{continues}, which its server stores. {error}") from error
    except NotFound as error:
        raise MlxcacheError(
            f"{continues}, which the server does not have: {error} Name the server that answered "
            "it with --url, or record a request that has the whole conversation in `input`."
        ) from error
    own = request["input"]
    items = [{"role": "user", "content": own}] if isinstance(own, str) else own
    whole = {key: value for key, value in request.items() if key != "previous_response_id"}
    return whole | {"input": [*history, *items]}


def _describe_wrong(raw: bytes) -> str | None:
    if not raw.strip():
        return "it is empty"
    try:
        text = decode_utf8(raw)
    except NotUtf8 as error:
        return f"it {error}"
    try:
        value = json.loads(text)
    except RecursionError:
        return None
    except ValueError as error:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) > 1 and all(map(_is_json, lines)):
            return f"it has {len(lines):,} JSON values, one per line; put one of them into a file"
        return f"it is not JSON ({error}) and begins with {_shortened(text.strip())!r}"
    return _describe_object(value) if isinstance(value, dict) else f"it is {_describe_kind(value)}"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _describe_object(value: dict[str, Any]) -> str | None:
    if "messages" in value:
        messages = value["messages"]
        if isinstance(messages, list):
            return None if messages else "its `messages` is empty"
        return f"its `messages` is {_describe_kind(messages)}"
    for key, why in _OTHER_BODIES:
        if key in value:
            return f"it has `{key}` and no `messages`, {why}"
    for key, below in value.items():
        if isinstance(below, dict) and isinstance(below.get("messages"), list):
            return f"`messages` is inside `{_shortened(key)}`; put that object into a file"
    if not value:
        return "it is an empty object"
    names = ", ".join(f"`{_shortened(key)}`" for key in list(value)[:_MAX_KEYS])
    more = f" and {len(value) - _MAX_KEYS} more" if len(value) > _MAX_KEYS else ""
    return f"it is an object without `messages`, with {names}{more}"


def _describe_kind(value: object) -> str:
    if isinstance(value, str):
        return f"the JSON text {_shortened(value)!r}"
    if isinstance(value, list):
        return f"a JSON list of length {len(value):,}"
    return "a JSON object" if isinstance(value, dict) else f"the JSON value {json.dumps(value)}"


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def print_pair(found: Mapping[str, Any]) -> None:
    out, lost = narrow_console(), found["lost"]
    total = found["prompt_tokens"]["second"]
    if lost is None or lost["reason"] == "first_seen":
        shared = min(found["shared_tokens"], total)
        out.print(Text("Nothing is lost.", "bold green"))
        how = "continues the first" if lost is None else "begins another conversation"
        reused = f"{format_count(shared, 'token')} reused, {total - shared:,} new."
        out.print(f"The second request {how}: {reused}")
    else:
        _print_lost(out, lost, total)
    if lost is not None and found["later"]:
        later = "; ".join(f"{one['where']} ({one['cause']})" for one in found["later"][:5])
        _row(out, "differs" if lost["reason"] == "first_seen" else "also", Text(later))
    for one in found["removed"]:
        rule = Text.assemble(
            (f"{one['where']}: {one['cause']}, by rule ", ""), (one["rule"], "bold")
        )
        _row(out, "removed", rule)
    if found["without_effect"]:
        _row(out, "no effect", Text(", ".join(found["without_effect"])))
    _print_notes(out, found, found["images"]["second"])


def _print_lost(out: Console, lost: Mapping[str, Any], total: int) -> None:
    reason = lost["reason"]
    out.print(
        Text.assemble(
            ("Differs" if reason in _REASONS else "Lost", "bold red"),
            f" at token {lost['at_token']:,} of {total:,}: ",
            f"{_REASONS.get(reason, reason)}, ",
            (lost["cause"], "bold"),
            ".",
        )
    )
    before, after = _escaped(lost["before"]), _escaped(lost["after"])
    from mlxcache.common_prefix import common_characters  # noqa: PLC0415 - imports numpy

    same = common_characters(before, after)
    _row(out, "where", Text(lost["where"]))
    most = min(len(before), len(after)) - same
    end = common_characters(before[::-1][:most], after[::-1][:most])
    _row(out, "before", _marked(before, same, end, "bold red"))
    _row(out, "now", _marked(after, same, end, "bold green"))
    again = f"{format_count(lost['lost_tokens'], 'token')} to be computed again"
    _row(out, "lost", Text(again if lost["lost_tokens"] else "no tokens that could be reused"))
    if lost["lost_tokens"]:
        _row(out, "to do", Text(lost["advice"]))


def print_audit(found: Mapping[str, Any]) -> None:
    out, total = narrow_console(), found["prompt_tokens"]
    data = [one for one in found["data"] if one["rule"] is None]
    removed = [one for one in found["data"] if one["rule"] is not None]
    if not data:
        out.print(Text("Nothing was found that is likely to change.", "bold green"))
        out.print(f"{format_count(total, 'token')}; tools, system text and reminders were checked.")
    else:
        _print_findings(out, data, total)
    for one in removed:
        text = Text.assemble(f"{one['where']}, line {one['line']}, by rule ", (one["rule"], "bold"))
        _row(out, "removed", text)
    _print_notes(out, found, found["images"])


def _print_findings(out: Console, data: Sequence[Mapping[str, Any]], total: int) -> None:
    things, tokens = format_count(len(data), "thing"), format_count(total, "token")
    out.print(Text.assemble((things, "bold yellow"), f" likely to change in {tokens}:"))
    for one in data[:_MAX_FINDINGS]:
        at = "not rendered" if one["at_token"] is None else f"token {one['at_token']:,}"
        out.print(
            Text.assemble(
                (one["cause"], "bold"),
                f"  {one['where']}, line {one['line']}: {at}, ",
                (f"{format_count(one['tokens_behind'], 'token')} behind it", "red"),
            )
        )
        _row(out, "", Text(_escaped(one["excerpt"])[:_EXCERPT], "cyan"))
    if len(data) > _MAX_FINDINGS:
        out.print(f"and {len(data) - _MAX_FINDINGS} more: use --json to list them.")
    for cause in dict.fromkeys(one["cause"] for one in data[:_MAX_FINDINGS]):
        advice = next(one["advice"] for one in data if one["cause"] == cause)
        _row(out, "to do", Text.assemble((f"{cause}: ", "bold"), advice))


def _row(out: Console, name: str, text: Text) -> None:
    table = Table.grid(padding=(0, 1))
    table.add_column(min_width=9, no_wrap=True, style="dim")
    table.add_column(overflow="fold")
    table.add_row(name, text)
    out.print(Padding(table, (0, 0, 0, 1)))


def _marked(text: str, start: int, end: int, style: str) -> Text:
    shown = Text(text)
    shown.stylize(style, start, len(text) - end)
    return shown[: _EXCERPT * 2]


def _escaped(text: str) -> str:
    shown = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    shown = shown.replace("\t", "\\t")
    return "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in shown)


def _print_notes(out: Console, found: Mapping[str, Any], images: int) -> None:
    notes = []
    if found["estimated"]:
        notes.append(
            "Token counts are those of the built-in demo's tokenizer, estimates for any other "
            "model: set --model."
        )
    if found["backend"] == "mlx-vlm":
        notes.append("The model is run by mlx-vlm.")
    if images:
        counted = format_count(images, "image")
        notes.append(
            f"{counted}: each counts as a line of text here; the model is fed more tokens for it."
        )
    for note in notes:
        out.print(Text(note, "dim"))
    if images and found["takes_images"] is False and not found["estimated"]:
        out.print(Text("This model takes no images: the server refuses the request.", "yellow"))
