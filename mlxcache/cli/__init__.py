"""The commands of `mlxcache`: parse flags, call the layers below, print results.

`main` has the typer app, `options` the flags that commands share. Modules that load MLX or an HTTP
client are imported inside functions, so that --help stays fast. No other layer imports this
package.
"""
