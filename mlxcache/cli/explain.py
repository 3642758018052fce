"""`mlxcache explain`: where two requests part and why; what in one is likely to change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mlxcache.cli import show
from mlxcache.cli.explain_file import read_request
from mlxcache.cli.output import reporting
from mlxcache.cli.progress import counting
from mlxcache.cli.target import Json
from mlxcache.config import Settings, load_settings

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
        # Here and not above: it is a page of its own, and --help needs none of it.
        from mlxcache.cli.explain_page import print_audit, print_pair  # noqa: PLC0415

        (print_audit if second is None else print_pair)(found)


def explain_pair(one: dict[str, Any], other: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """What `explain A.json B.json` says, as JSON has it. Raises MlxcacheError."""
    from mlxcache.api.bodies import without_effect  # noqa: PLC0415
    from mlxcache.prompt.explain import Explainer  # noqa: PLC0415

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
        "without_effect": without_effect(one, other),
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
    from mlxcache.api.bodies import chat_of  # noqa: PLC0415
    from mlxcache.prompt.explain import Side  # noqa: PLC0415

    prompt = builder.chat(chat_of(request), "explained")  # what rules remember, they remember by it
    return Side(prompt.source, prompt.ids)
