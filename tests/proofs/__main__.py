"""`python -m tests.proofs ARGS` is `bin/bench ARGS`."""

import typer

from tests.proofs.command import bench

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(context_settings={"help_option_names": ["-h", "--help"]})(bench)
app(prog_name="bin/bench")
