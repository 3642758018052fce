"""Which checkpoints stay on disk for the sake of sessions that end there."""

from mlxcache.store.listing import on_disk
from mlxcache.store.sessions import Sessions, Turn
from tests.store.content import NAMESPACE, kv, snapshot, tokens


def put(store, ids, positions):
    """Write a run of all of `ids`, and checkpoints at `positions`."""
    store.write_run(ids, 0, kv(ids))
    for position in positions:
        store.write_checkpoint(ids[:position], snapshot(ids[:position]))


def booked(sessions, ids, at):
    """Book `ids` as a turn of the conversation that begins with its first 100 tokens."""
    return sessions.turn(Turn(NAMESPACE, "model", ids, len(ids), 100, 0, at))


def durable(store, sessions, session):
    """What is told of a session as `durable_tokens`."""
    return on_disk(store, sessions.leaves(session)).tokens[0]


def test_a_turn_that_is_not_booked_yet_takes_nothing_from_the_one_before(store):
    """A server may be killed between the two; the client may then go on in another way."""
    ids, sessions = tokens(1200), Sessions(store.database)
    put(store, ids, [300, 600])
    session = booked(sessions, ids[:640], 1.0)
    put(store, ids, [800, 900, 1000, 1100, 1200])
    assert durable(store, sessions, session) == 600


def test_a_fork_that_lags_behind_keeps_its_last_checkpoint(store):
    """Also where the session that it was forked from goes on; without it that one's goes."""
    ids, sessions = tokens(2400), Sessions(store.database)
    put(store, ids, [300, 600])
    session = booked(sessions, ids[:640], 1.0)
    fork = sessions.fork(session, 2.0)
    put(store, ids, [800, 900])
    booked(sessions, ids[:900], 3.0)
    put(store, ids, [1200, 1400, 1600, 1800, 2000, 2200])
    booked(sessions, ids, 4.0)
    assert (durable(store, sessions, session), durable(store, sessions, fork)) == (2200, 600)
    held = [one.position for one in store.find(ids, touch=False).checkpoints]
    assert 600 in held
    assert 800 not in held


def test_other_conversations_keep_nothing(store):
    """One that ends elsewhere, or of another model, has no use for the checkpoints of this one."""
    ids, sessions = tokens(1200), Sessions(store.database)
    other = Turn("another", "model", ids[:640], 640, 100, 0, 1.0)
    sessions.turn(other)
    booked(sessions, tokens(640, seed=5), 1.0)
    put(store, ids, [300, 600, 800, 900, 1000, 1100, 1200])
    assert 600 not in [one.position for one in store.find(ids, touch=False).checkpoints]
