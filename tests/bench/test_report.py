"""Findings, bounds, and the report that is made of them."""

from __future__ import annotations

import json
from pathlib import Path

from mlxcache.bench import findings as report
from mlxcache.bench.findings import Findings
from mlxcache.typed import convert


def findings() -> Findings:
    found = Findings("decode", "tiny, 4bit", seconds=3.2)
    found.add("Decoding", "1,000 tokens, mlxcache", "one reply", "tokens/s", 10.0, 30.0, 20.0)
    found.add("Decoding", "1,000 tokens, mlx_lm.generate", "one reply", "tokens/s", 200.0)
    found.add("Decoding", "1,000 tokens, mlxcache", "8 at once | all", "s", 0.25)
    found.hold("speed", 0.96, 0.97, least=True)
    found.hold("time", 1.05, 1.10)
    found.hold("near", None, 0.97, least=True, why_not="no memory")
    found.hold("far", 2.0, 1.0, why_not="too short")
    found.not_run.append("100,000 tokens: about 340 s needed, 12 s left")
    return found


def pages(*all: Findings) -> str:
    return report.as_markdown({"chip": "M9", "memory_bytes": 64e9}, {"lengths": "full"}, all)


def test_every_bound_has_its_verdict() -> None:
    """Also one that these figures cannot show, which has not passed."""
    page = pages(findings())
    assert "| speed (tiny, 4bit) | 0.96 | ≥ 0.97 | **failed** |" in page
    assert "| time (tiny, 4bit) | 1.05 | ≤ 1.1 | passed |" in page
    assert "| far (tiny, 4bit) | 2 | ≤ 1 | not checked: too short |" in page
    assert "| near (tiny, 4bit) |  | ≥ 0.97 | not checked: no memory |" in page


def test_the_json_has_every_sample_and_comes_back(tmp_path: Path) -> None:
    """What a child process prints is what its parent adds."""
    beside = report.write(tmp_path / "r.md", "page", report.as_json({}, {}, [findings()]))
    assert beside == tmp_path / "r.json"
    (value,) = json.loads(beside.read_text())["scenarios"]
    figure = value["tables"]["Decoding"]["1,000 tokens, mlxcache"]["one reply"]
    expected = {"unit": "tokens/s", "samples": [10.0, 30.0, 20.0], "median": 20.0, "runs": 3}
    assert figure == expected
    assert [check["ok"] for check in value["checks"]] == [False, True]
    again = Findings("decode", "tiny, 4bit", seconds=3.2)
    again.merge(convert(Findings, value))
    assert again == findings()
