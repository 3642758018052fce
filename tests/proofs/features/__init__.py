"""Fuzzer of features: random conversations with random features, each reply beside the cold one.

`python -m tests.proofs.features --conversations 2000` plays them against servers of several models;
`--seed N` plays one again. A conversation is drawn from its number alone (`plan`), sent by one API
(`apis`) to a server that caches and to one that never has anything cached (`servers`), and judged
(`play`).
"""
