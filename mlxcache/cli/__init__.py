"""The commands of `mlxcache`: parse flags, call the layers below, print.

`main` has the typer app; `options` and `target` are the flags that commands share. `launch`,
`doctor` and `top` are the larger commands. Modules that MLX or an HTTP client would load are
imported inside functions, so that --help stays fast. No other layer imports this package.
"""
