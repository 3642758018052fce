"""Quantiles of recorded sessions of agents: the numbers of `mlxcache.plan.agents`.

python -m tests.proofs.agent_numbers FILE|FOLDER ...
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from mlxcache.plan.agents import AT
from mlxcache.plan.trace import Trace
from mlxcache.plan.trace_files import read_trace

COMPACTED = 0.6
"""Share of the path before, below which both a prompt and what they share mean a compaction."""


def numbers(trace: Trace) -> dict[str, list[float]]:
    found = defaultdict[str, list[float]](list)
    for chain in trace.chains():
        found["TURNS"].append(len(chain))
        for one in map(trace.requests.__getitem__, chain):
            found["REPLIED"].append(one.reply_tokens)
            if not one.after:
                found["FIRST"].append(one.prompt_tokens - one.head)
                continue
            found["PAUSE_S"].append(one.delay)
            before = trace.requests[one.after[0]]
            path = before.prompt_tokens + before.reply_tokens
            shared = min(one.shared(before), one.prompt_tokens)
            if max(one.prompt_tokens, shared) < COMPACTED * path:
                found["SUMMARY"].append(one.prompt_tokens - one.head)
            elif shared < before.prompt_tokens - trace.block_tokens:
                found["LOST"].append(path - shared)
            else:
                found["ADDED"].append(one.prompt_tokens - shared)
                found["not sent"] += [path - shared] * (shared < path)
    return found


if __name__ == "__main__":
    for name, values in numbers(read_trace(*map(Path, sys.argv[1:]))).items():
        print(f"{name} of {len(values)}: {np.quantile(values, AT).round().astype(int).tolist()}")
