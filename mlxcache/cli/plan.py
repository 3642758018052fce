"""The commands `mlxcache plan`, which predicts what users get from a machine, and `trace`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from mlxcache.cli.connect import own_command
from mlxcache.cli.options import (
    ApiKey,
    Config,
    Flags,
    Json,
    Where,
    find_server,
    located,
    positive_size,
    with_settings,
)
from mlxcache.cli.output import console, count_bar
from mlxcache.cli.show import (
    Result,
    format_count,
    format_duration,
    print_facts,
    print_table,
)
from mlxcache.config import Settings, disk_limit, format_size, load_settings, ram_limit
from mlxcache.config.flags import option
from mlxcache.errors import ConfigError, MlxcacheError
from mlxcache.private import create

if TYPE_CHECKING:
    from mlxcache.cli.remote import Remote
    from mlxcache.model.examine import Examined
    from mlxcache.plan.cache import Memory
    from mlxcache.plan.plan import Plan, Waits


BAR = 30
"""Columns of a bar for 100%."""

Model = Annotated[
    str | None,
    option(
        "PATH|HUB_ID",
        "The model. Its config.json is enough: its weights need not be on this machine.",
    ),
]
Users = Annotated[
    int | None,
    option(
        "N",
        "People or agents who work at once. Default: 1; with --trace, those of the trace.",
        min=1,
        max=10_000,
    ),
]
Context = Annotated[
    int | None,
    option(
        "N",
        "Tokens to which conversations grow. Default: 160,000, or the model's own length if "
        "it is shorter. Not with --trace.",
        min=256,
    ),
]
TraceFiles = Annotated[
    list[Path] | None,
    option(
        "FILE|FOLDER",
        "Requests to plan for: a file of `mlxcache trace`, of AIPerf's generator of agents, or in "
        "Mooncake's form; or files or folders of recorded sessions of Claude Code, the option "
        "once for each. Default: agents like those of such sessions.",
        "--trace",
    ),
]
BlockTokens = Annotated[
    int | None,
    option("N", "Tokens per block of the trace. Default: derived from its lengths.", min=1),
]
Count = Annotated[
    int | None,
    option("N", "Use the first N requests of the trace.", "--requests", min=1),
]
PrefillSpeed = Annotated[
    float | None,
    option("TOKENS/S", "Speed of prefill at a prompt's beginning.", min=0.001),
]
DecodeSpeed = Annotated[float | None, option("TOKENS/S", "Speed of one reply.", min=0.001)]
DiskSpeed = Annotated[str | None, option("SIZE", "Bytes per second read from disk, such as 2GB.")]
RemoteSpeed = Annotated[
    str | None,
    option("SIZE", "Plan with a remote that keeps everything, read at so many bytes per second."),
]
Url = Annotated[
    str | None,
    option(
        "URL",
        "Take speeds from the recent requests of the server at this address, and --ram and "
        "--disk too if they are not given.",
    ),
]
Plot = Annotated[Path | None, option("FILE", "Also draw the hit rate by RAM as SVG.")]


@with_settings("ram", "disk", "concurrency", "adapter", "kv_bits", "trust_remote_code")
def plan(
    *,
    model: Model = None,
    users: Users = None,
    context: Context = None,
    trace: TraceFiles = None,
    block_tokens: BlockTokens = None,
    requests: Count = None,
    prefill_speed: PrefillSpeed = None,
    decode_speed: DecodeSpeed = None,
    disk_speed: DiskSpeed = None,
    remote_speed: RemoteSpeed = None,
    flags: Flags,
    url: Url = None,
    api_key: ApiKey = None,
    plot: Plot = None,
    config: Config = None,
    as_json: Json = False,
) -> Result:
    """Predict what users of a model get from a machine: hit rates, first tokens, load, disk.

    That is: the share of prompt tokens that are reused, the time to the first token of a reply, the
    share of time in which the machine computes, and the bytes written to disk. The server's cache
    is simulated, without the model, over a recorded trace or synthetic agents, which takes seconds
    to minutes. No server is needed.
    """
    settings = load_settings({"model": model, **flags}, os.environ, config).for_request(None)
    if settings.model is None:
        raise ConfigError(
            "--model is missing: name a folder with config.json, or a Hub id, such as "
            f"`{own_command()} plan --model mlx-community/Qwen3-4B-Instruct-2507-4bit`"
        )
    if trace and context is not None:
        raise ConfigError("--context and --trace exclude each other: a trace has its lengths")
    from mlxcache.plan.agents import CONTEXT, agents_trace  # noqa: PLC0415
    from mlxcache.plan.plan import make_plan  # noqa: PLC0415 - numpy and MLX take a while
    from mlxcache.plan.simulate import Speed, speed_of  # noqa: PLC0415
    from mlxcache.plan.trace_files import read_trace  # noqa: PLC0415

    given = None
    if trace:
        with count_bar("reading, in files", shown=not as_json) as step:
            given = read_trace(*trace, block_tokens=block_tokens, progress=step)
    with count_bar("planning, in requests", shown=not as_json) as step:
        examined = _examine(settings, context)
        longest = context or min(CONTEXT, examined.info.context_length)
        played = given or agents_trace(users or 1, longest)
        if requests is not None:
            played = played.first(requests)
        server = None if url is None else find_server(url, api_key)
        figures = None if server is None else server.stats()
        memory = _memory(settings, flags, examined, figures, remote=remote_speed is not None)
        speed = Speed()
        if server is not None:
            speed = speed_of(server.requests(1000), examined.layout.bytes_per_token)
        speed = speed.with_given(
            prefill=prefill_speed,
            decode=decode_speed,
            disk=_speed_of("--disk-speed", disk_speed),
            remote=_speed_of("--remote-speed", remote_speed),
        )
        found = make_plan(
            played,
            examined.layout,
            memory,
            speed,
            users=users if given is not None else users or 1,
            at_once=settings.concurrency,
            disk_sizes=given is None,
            progress=step,
        )
    if plot is not None:
        from mlxcache.plan.chart import draw  # noqa: PLC0415

        try:
            plot.write_text(draw(found), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--plot {plot} cannot be written: {error.strerror}") from error
    return Result(found.as_object(), partial(show, found))


def _examine(settings: Settings, context: int | None) -> Examined:
    from mlxcache.cache.capacity import choose_bits  # noqa: PLC0415 - mlx-lm takes seconds
    from mlxcache.engine.opening import spec_of  # noqa: PLC0415
    from mlxcache.model.examine import examine  # noqa: PLC0415

    assert settings.model is not None
    spec = spec_of(settings, settings.model)
    bare = replace(spec, id=None, context=None, draft=None)
    bits = choose_bits(settings.kv_bits, partial(_ram, settings))
    found = examine(bare, bits, needs_weights=False)
    if context is not None and context > found.info.max_context_length:
        raise ConfigError(
            f"--context {context} is more than the {found.info.max_context_length} tokens that "
            "this model was made for"
        )
    return found


def _ram(settings: Settings, weights: int) -> int:
    from mlxcache.config.sizes import machine_bytes  # noqa: PLC0415
    from mlxcache.model.device import working_set_bytes  # noqa: PLC0415

    return ram_limit(
        settings.ram,
        machine_bytes=machine_bytes(),
        working_set_bytes=working_set_bytes(),
        weights_bytes=weights,
    )


def _memory(
    settings: Settings,
    flags: Flags,
    examined: Examined,
    figures: Mapping[str, Any] | None,
    *,
    remote: bool,
) -> Memory:
    from mlxcache.plan.cache import Memory  # noqa: PLC0415

    ram = _ram(settings, examined.info.weights_bytes)
    disk = disk_limit(settings.disk, settings.cache_dir / "store")
    found = Memory(ram, disk, remote=remote)
    if figures is None:
        return found
    held, stored = figures["ram"], figures["disk"]
    if "disk" not in flags:
        found = replace(found, disk=stored.get("limit_bytes") or 0)
    if "ram" not in flags:
        kinds = {name: held["kinds"].get(name, 0) for name in ("pool", "transient", "pending")}
        found = replace(found, ram=held["limit_bytes"], reserved=kinds)
    return found


def _speed_of(flag: str, text: str | None) -> float | None:
    return None if text is None else positive_size(flag, text, "bytes per second such as 2GB")


# -- printing ----------------------------------------------------------------------------------


def show(plan: Plan) -> None:
    out = console()
    print_facts(_facts(plan))
    out.print()
    columns = (("prompt tokens from", "left"), ("share", "right"), ("", "left"))
    print_table(columns, _tiers(plan))
    out.print()
    columns = (("RAM alone", "right"), ("reused", "right"), ("", "left"))
    curve = ((format_size(one.nbytes), one.hit_rate) for one in plan.ram.curve)
    rows = ((size, f"{share:.1%}", _bar(share)) for size, share in curve)
    print_table(columns, list(dict.fromkeys(rows)))  # sizes of a short trace lie close together
    out.print()
    beside = f"disk beside {format_size(plan.memory.ram)} RAM"
    columns = (("of the ceiling", "right"), ("RAM alone", "right"), (beside, "right"))
    print_table(columns[: 2 + bool(plan.disk.curve)], _sizes(plan))
    if not plan.speed.times:
        out.print(
            "\nNo times: give --prefill-speed and --decode-speed, or the --url of a server that "
            "has served some requests with this model."
        )


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    from mlxcache.plan.plan import FULL  # noqa: PLC0415

    trace, outcome, layout = plan.trace, plan.outcome, plan.layout
    kind = {
        "agents": "made",
        "sessions": "recorded by others",
        "agentic": "AIPerf's form",
        "mooncake": "Mooncake's",
    }
    users = f", {plan.users:,} at once" if plan.users else ""
    yield (
        "Requests",
        f"{len(trace.requests):,} of {len(trace.chains()):,} sessions{users} "
        f"({kind.get(trace.form, 'recorded')})",
    )
    if outcome.refused:
        yield "Refused", f"{outcome.refused:,}, whose prompts do not fit"
    yield "KV", f"{format_size(layout.bytes_per_token)} per token"
    disk = format_size(plan.memory.disk) if plan.memory.disk else "off"
    room = f"--ram {format_size(plan.memory.ram)}, of it {format_size(max(0, plan.room))}"
    yield "Machine", f"{room} for conversations; --disk {disk}"
    fed = sum(one.reuse.fed for one in outcome.served)
    yield "Fed", f"{fed:,} of {outcome.prompt_tokens:,} prompt tokens"
    if (recorded := plan.recorded()) is not None:
        yield "Recorded", f"{recorded:.1%} reused by the server of the trace"
    if (first := plan.first_token_s()) is not None:
        median, late = map(format_duration, first)
        yield "First token", f"{median} median, {late} for the slowest 5%"
        yield "MLX thread", f"busy {outcome.busy:.0%} of {format_duration(outcome.span_s)}"
    if (waits := plan.waits()) is not None:
        yield "Waits", _waits_line(plan, waits)
        yield "Of it", _parts_line(waits)
    if (most := plan.users_per_machine()) is not None:
        yield "Users", f"{most:,.1f} keep one such machine busy for {FULL:.0%} of its time"
    if plan.memory.disk:
        day = plan.written_per_day()
        text = f"{format_size(outcome.written)} written"
        yield "Disk", text if day is None else f"{text}, {format_size(round(day))} a day"


def _waits_line(plan: Plan, waits: Waits) -> str:
    each = "day" if plan.trace.form == "agents" else "session"
    requests = len(plan.trace.requests) / plan.days
    saved = 1 - waits.total / waits.uncached if waits.uncached else 0.0
    return (
        f"{format_duration(waits.total)} in a {each} of {requests:,.0f} requests; without a cache "
        f"{format_duration(waits.uncached)}: {saved:.0%} saved"
    )


def _parts_line(waits: Waits) -> str:
    parts = {
        "first prompts": waits.first,
        "new text": waits.new,
        "evicted text": waits.again,
        "restoring": waits.restore,
        "replies": waits.replies,
    }
    return ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in parts.items())


def _sizes(plan: Plan) -> Iterator[tuple[str, ...]]:
    from mlxcache.plan.plan import SHARES  # noqa: PLC0415

    for at, share in enumerate(SHARES):
        sizes = [each.enough[at] for each in (plan.ram, plan.disk) if each.curve]
        yield f"{share:.0%}", *(format_size(one) if one else "more" for one in sizes)


def _tiers(plan: Plan) -> Iterator[tuple[str, str, str]]:
    outcome = plan.outcome
    rows = [
        ("RAM", outcome.share(lambda reuse: reuse.cached - reuse.restored)),
        ("disk", outcome.share(lambda reuse: reuse.disk)),
    ]
    if plan.memory.remote:
        rows.append(("remote", outcome.share(lambda reuse: reuse.remote)))
    rows += [("all", outcome.hit_rate), ("ceiling: a cache without limits", plan.ceiling)]
    for name, share in rows:
        yield name, f"{share:.1%}", _bar(share)


def _bar(share: float) -> str:
    return "█" * round(BAR * share)


# -- trace -------------------------------------------------------------------------------------


@partial(located, find=find_server)
def trace(
    where: Where,
    *,
    output: Annotated[Path, option("FILE", "File to write.", "-o", "--output")] = Path(
        "trace.jsonl"
    ),
    minutes: Annotated[float | None, option("N", "End after so many minutes.", min=0.001)] = None,
    requests: Annotated[int | None, option("N", "End after so many requests.", min=1)] = None,
) -> Result:
    """Record the requests of a running server as a trace without any text.

    Each line has a request's times and lengths, and the names of its blocks of tokens. The names
    are made with a random key that is not stored. Read the file with `mlxcache plan --trace`. Needs
    a running server; Ctrl-C ends the recording.
    """
    try:
        with create(output) as file:
            console(stderr=True).print(f"Recording to {output}; Ctrl-C ends it.")
            count = record(where, file, minutes, requests)
    except OSError as error:
        raise MlxcacheError(f"{output} cannot be written: {error.strerror}.") from error
    found = {"object": "trace", "path": str(output), "requests": count}
    return Result(found, f"{format_count(count, 'request')} in {output}")


def record(where: Remote, file: BinaryIO, minutes: float | None, requests: int | None) -> int:
    """Record the requests of the server `where` to `file`; return their number. Blocks."""
    count, began = 0, time.monotonic()
    with suppress(KeyboardInterrupt):
        for name, body in where.trace():
            if name == "end":
                file.flush()
                raise MlxcacheError(
                    f"The server ended the recording after {format_count(count, 'request')}: "
                    f"{body['reason']}."
                )
            if name:
                file.write(json.dumps(body, separators=(",", ":")).encode() + b"\n")
                file.flush()
                count += name == "request"
            over = minutes is not None and time.monotonic() - began >= 60 * minutes
            if over or count == requests:
                break
    return count
