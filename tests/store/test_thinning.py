"""Thinning of checkpoints on disk: per path, for sessions, within a share."""

from collections.abc import Iterator
from itertools import pairwise

import pytest

from mlxcache.safetensors import Tensor
from mlxcache.store.sessions import Sessions, Turn
from mlxcache.store.store import Store
from mlxcache.tree.thinning import BUDGET_SHARE, FEWEST, NEWEST, allowed
from tests.store.content import (
    NAMESPACE,
    assert_right,
    branch,
    kv,
    opened,
    run_bytes,
    snapshot,
    state,
    tokens,
)

LIMIT = 8_000_000
SIZE = 130_000
"""Bytes of each checkpoint: a 62nd of the limit, 5,400 tokens' worth of KV."""


@pytest.fixture
def store(folder) -> Iterator[Store]:
    with opened(folder, LIMIT) as opened_store:
        yield opened_store


def large(ids):
    """A state of `SIZE` bytes."""
    last = state(ids)[-1:]
    return [
        Tensor("state", "U64", (1,), last.data),
        Tensor("x", "U8", (SIZE,), memoryview(bytes(SIZE))),
    ]


def put(store, ids, positions):
    """Write a run of all of `ids`, and checkpoints at `positions`."""
    store.write_run(ids, 0, kv(ids))
    save(store, ids, positions)


def save(store, ids, positions):
    for position in positions:
        store.write_checkpoint(ids[:position], large(ids[:position]))


def held(store, ids):
    """Positions of the checkpoints along `ids`."""
    return [saved.position for saved in store.find(ids, touch=False).checkpoints]


def booked(sessions, ids, at):
    return sessions.record_turn(Turn(NAMESPACE, "model", ids, len(ids), 100, 0, at))


def durable(store, sessions, session):
    listed = sessions.listed([sessions.get(session)])
    return store.on_disk(listed, sessions.ids_of)[0].disk.tokens[0]


def test_a_long_path_keeps_its_first_its_newest_and_some_between(store):
    ids = tokens(20_000)
    store.write_run(ids, 0, kv(ids))
    most = allowed(run_bytes(20_000), SIZE, LIMIT) // SIZE + 1  # the run's file has a header
    assert FEWEST < most < 15
    for position in range(500, 20_001, 500):
        save(store, ids, [position])
        assert len(held(store, ids)) <= most
    kept = held(store, ids)
    assert len(kept) == most
    assert (kept[0], kept[-NEWEST:]) == (500, [18_500, 19_000, 19_500, 20_000])
    assert all(b - a <= 20_000 - b for a, b in pairwise(kept[: -NEWEST + 1]))
    assert assert_right(store, ids).length == 20_000


def test_small_checkpoints_all_stay(store):
    ids = tokens(4000)
    for position in range(400, 4001, 400):
        store.write_checkpoint(ids[:position], snapshot(ids[:position]))
    assert held(store, ids) == list(range(400, 4001, 400))


def test_checkpoints_stay_linked_as_others_go(store):
    ids = tokens(1400)
    save(store, ids, range(100, 1401, 100))
    query = "SELECT stop, (SELECT stop FROM file AS f WHERE f.id = file.previous) FROM file"
    with store.database.read() as connection:
        linked = dict(connection.execute(query).fetchall())
    kept = held(store, ids)
    assert len(kept) < 14
    assert linked == dict(zip(kept, [None, *kept], strict=False))


def test_a_path_keeps_its_newest_when_another_goes_on(store):
    ids = tokens(4000)
    save(store, ids, range(100, 801, 100))
    before = held(store, ids)
    fork = branch(ids, 750, 900)
    save(store, fork, [900])
    save(store, ids, range(900, 3001, 100))
    assert held(store, fork)[-4:] == [*before[-4:-1], 900]
    assert held(store, ids)[-1] == 3000


def test_the_newest_are_within_their_share(store):
    paths = [tokens(3000, seed) for seed in range(6)]
    most = 0
    for ids in paths:
        put(store, ids, [500, 1000, 1500, 2000, 2500, 3000])
        with store.database.read() as connection:
            query = "SELECT sum(disk) FROM file WHERE kind = 'checkpoint'"
            most = max(most, connection.execute(query).fetchone()[0])
    assert BUDGET_SHARE * LIMIT - 2 * SIZE < most <= BUDGET_SHARE * LIMIT
    assert held(store, paths[-1]) == [500, 1000, 1500, 2000, 2500, 3000]
    assert len(held(store, paths[0])) < 3
    assert all(store.find(ids).length == 3000 for ids in paths)
    assert store.check() == []


def test_a_turn_that_is_not_booked_yet_takes_nothing_from_the_one_before(store):
    """A server may be killed before the turn is recorded, and the client continue elsewhere."""
    ids, sessions = tokens(2400), Sessions(store.database)
    put(store, ids, [300, 600])
    session = booked(sessions, ids[:640], 1.0)
    save(store, ids, range(800, 2401, 100))
    assert durable(store, sessions, session) == 600


def test_a_fork_that_lags_behind_keeps_its_last_checkpoint(store):
    ids, sessions = tokens(3400), Sessions(store.database)
    put(store, ids, [300, 600])
    session = booked(sessions, ids[:640], 1.0)
    fork = sessions.fork(session, 2.0)
    save(store, ids, [800, 900])
    booked(sessions, ids[:900], 3.0)
    save(store, ids, range(1000, 3301, 100))
    booked(sessions, ids, 4.0)
    assert (durable(store, sessions, session), durable(store, sessions, fork)) == (3300, 600)
    assert 600 in held(store, ids)
    assert 800 not in held(store, ids)


def test_other_conversations_keep_nothing(store):
    ids, sessions = tokens(2400), Sessions(store.database)
    other = Turn("another", "model", ids[:640], 640, 100, 0, 1.0)
    sessions.record_turn(other)
    booked(sessions, tokens(640, seed=5), 1.0)
    put(store, ids, [300, 600, *range(700, 2401, 100)])
    assert 600 not in held(store, ids)


def test_ends_of_replies_that_were_left_go_first(store):
    """Each turn leaves out the last reply's thought, so its end is on no continued path."""
    ids, beside = tokens(6000), []
    for at in range(200, 5801, 200):
        thought = branch(ids, at + 2, at + 60, seed=at)
        save(store, ids, [at])
        store.write_checkpoint(thought, large(thought))
        beside.append(held(store, thought)[-1] == at + 60)
        query = "SELECT count(*) FROM file"
        with store.database.read() as connection:
            count = connection.execute(query).fetchone()[0]
    most = allowed(0, SIZE, LIMIT) // SIZE
    assert all(beside)
    assert count <= most + 3
    kept = held(store, ids)
    assert (kept[0], kept[-NEWEST:]) == (200, [5200, 5400, 5600, 5800])
    assert held(store, branch(ids, 5802, 5860, seed=5800))[-1] == 5860
    assert held(store, branch(ids, 402, 460, seed=400))[-1] <= 400


def test_a_fork_keeps_the_end_of_its_reply(store):
    ids, sessions = tokens(6000), Sessions(store.database)
    put(store, ids, [200, 400])
    fork = branch(ids, 402, 460)
    store.write_run(fork, 384, kv(fork, 384))
    store.write_checkpoint(fork, large(fork))
    session = booked(sessions, fork, 1.0)
    booked(sessions, tokens(700, 3), 2.0)
    save(store, ids, range(600, 5801, 200))
    assert held(store, fork) == [200, 400, 460]
    assert durable(store, sessions, session) == 460


def test_kv_ahead_of_the_first_checkpoint_is_not_durable_yet(store):
    """No server could continue from it; without a model this is inferred from other files."""
    sessions = Sessions(store.database)
    ids, others = tokens(700), tokens(300, 1)
    store.write_run(ids, 0, kv(ids))
    session = booked(sessions, ids, 1.0)
    assert durable(store, sessions, session) == 700
    put(store, others, [200])
    assert durable(store, sessions, session) == 0
    with opened(store.folder, LIMIT, needs_checkpoints=False) as sliceable:
        assert durable(sliceable, sessions, session) == 700
    with opened(store.folder, LIMIT, needs_checkpoints=True) as opaque:
        assert durable(opaque, sessions, session) == 0
    save(store, ids, [400])
    assert durable(store, sessions, session) == 400
