"""Proofs of the server's promises, too long for the suite: crashes, memory, budget, disk speed.

`bin/bench` in a clone plays them beside the scenarios of `mlxcache bench`, on models made on the
spot; `python -m tests.proofs.crash` kills servers. They need no test extra.
"""
