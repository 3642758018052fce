"""The proof of policies: an oracle is not below what it is compared with, and causes add up."""

from __future__ import annotations

from mlxcache.plan.agents import agents_trace
from mlxcache.plan.cache import Memory
from mlxcache.plan.simulate import Simulation
from tests.proofs.policies import PLAIN, POLICIES, SPEED, causes, played


def test_no_policy_is_better_than_one_that_knows_the_future() -> None:
    trace = agents_trace(4, 6000, sessions=1, seed=2).first(160)
    unlimited = Simulation(PLAIN, Memory(1 << 60), SPEED)
    first = unlimited.run(trace, 4)
    ram = unlimited.high_water // 4
    found = {
        name: played(trace, PLAIN, order, ram=ram, users=4, first=first)
        for name, order in POLICIES.items()
    }
    assert max(found.values()) <= found["oracle"] + 0.005


def test_every_fed_token_has_a_cause() -> None:
    *shares, last = causes(agents_trace(2, 6000, sessions=2, seed=3))
    assert abs(sum(int(one.split("|")[2].strip(" %")) for one in shares) - 100) <= len(shares)
    assert "came back" in last
