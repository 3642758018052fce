"""`python -m mlxcache.bench ARGS` is `mlxcache bench ARGS`."""

import typer

from mlxcache.bench.command import bench

typer.run(bench)
