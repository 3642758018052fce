"""Log lines, progress without a terminal, and errors with their exit status."""

import io
import logging

import pytest
import typer
from rich.console import Console

from mlxcache.cli.log import ConsoleHandler, log_line
from mlxcache.cli.output import loading_bar, reporting
from mlxcache.errors import ConfigError, ModelError
from mlxcache.types import Guessed, RequestRecord


def plain() -> Console:
    return Console(file=io.StringIO(), highlight=False, markup=False, soft_wrap=True)


def written(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def record(**values: object) -> RequestRecord:
    base = {
        "id": "req_1",
        "session": "5f0c1f5e-0000-4000-8000-3f2a9c1e7d54",
        "session_id": "ses_3f2a9c1e7d54",
        "api": "anthropic",
        "client": "claude-cli/2.1.329",
        "status": "done",
        "created_at": 0.0,
    }
    return RequestRecord(**(base | values))  # type: ignore[arg-type]


def test_a_request_is_one_line_with_every_figure():
    """The speed is that of the steps after the first token."""
    line = log_line(
        record(
            prompt_tokens=18532,
            cached_tokens=18400,
            fed_tokens=132,
            generated_tokens=101,
            timing={"first_token_s": 0.314, "decode_s": 2.5},
            finish_reason="tool_calls",
        )
    )
    assert line == (
        "ses_3f2a9c1e7d54  prompt 18532  cached 18400  fed 132  first token 0.31 s  "
        "40.0 tok/s  generated 101  tool_calls"
    )


def test_guesses_are_told_with_what_they_saved() -> None:
    one = record(generated_tokens=101)
    one.guesses |= {"heads": Guessed(50, 40, 5), "history": Guessed(30, 20, 4)}
    assert "generated 101 (60 of 80 drafts accepted in 9 passes, 0.00 s saved)" in log_line(one)
    one.guesses["history"].saved_s = -0.25
    assert "in 9 passes, 0.25 s lost)" in log_line(one)


def test_a_request_to_one_of_several_models_names_it():
    one = record(model="small", prompt_tokens=20, finish_reason="stop")
    assert log_line(one, several=True).startswith("ses_3f2a9c1e7d54  small  prompt 20  ")
    assert log_line(one).startswith("ses_3f2a9c1e7d54  prompt 20  ")


@pytest.mark.parametrize(("api", "word"), [("chat", "stop"), ("messages", "stop_sequence")])
def test_the_end_at_a_stop_string_is_named_as_in_the_reply(api, word):
    assert log_line(record(api=api, finish_reason="stop_sequence")).split("  ")[-1] == word


def test_a_request_that_never_ran_has_dashes():
    line = log_line(record(session_id=None, client=None, status="rejected", error="no\nroom"))
    assert line == (
        "-  prompt 0  cached 0  fed 0  first token -  - tok/s  generated 0  rejected  no room"
    )


def test_a_request_without_a_label_has_its_clients_name():
    line = log_line(record(session_id=None, client="OpenAI/Python 2.20.0"))
    assert line.startswith("client OpenAI/Python 2.20.0  prompt 0  cached 0")


def test_one_token_has_no_speed():
    line = log_line(record(generated_tokens=1, timing={"first_token_s": 1.0, "decode_s": 0.0}))
    assert "- tok/s" in line


def test_progress_on_a_pipe_is_a_line_per_tenth():
    console = plain()
    with loading_bar(console) as progress:
        for n in range(1001):
            progress("downloading org/model", n / 1000)
        progress("loading the weights", None)
    lines = written(console)
    assert len(lines) == 12
    assert lines[0] == "downloading org/model 0%"
    assert lines[-2:] == ["downloading org/model 100%", "loading the weights"]


def test_progress_on_a_terminal_is_a_bar():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with loading_bar(console) as progress:
        progress("downloading org/model", 0.5)
        progress("loading the weights", None)
    assert isinstance(console.file, io.StringIO)
    assert "loading the weights" in console.file.getvalue()


@pytest.mark.parametrize(("error", "status"), [(ConfigError, 2), (ModelError, 1)])
def test_errors_are_printed_as_one_line_with_an_exit_status(error, status, capsys):
    """2 for wrong usage, 1 for a failure; markup in a message is printed as text."""
    with pytest.raises(typer.Exit) as raised, reporting():
        raise error("port [bold]1[/bold] is wrong")
    assert raised.value.exit_code == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "Error: port [bold]1[/bold] is wrong\n"


def test_log_records_have_their_level_from_warning_on():
    """Markup in a message is printed as text."""
    console = plain()
    logger = logging.Logger("a")
    logger.addHandler(ConsoleHandler(console))
    logger.info("session [red]x[/red]")
    logger.warning("careful")
    first, second = written(console)
    assert first.split(" ", 1)[1] == "session [red]x[/red]"
    assert second.split(" ", 1)[1] == "warning: careful"
