"""The command `mlxcache`, also as `python -m mlxcache` where its script is not on the PATH."""

from mlxcache.cli.main import main

if __name__ == "__main__":
    main()
