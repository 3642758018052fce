"""Sessions, in a database on disk and in memory."""

from dataclasses import replace
from itertools import count

import pytest

from mlxcache.errors import BadRequest, NotFound, StoreError
from mlxcache.store import session_rows
from mlxcache.store.database import Database, TemporaryDatabase
from mlxcache.store.leaves import SETTLED_TURNS, Leaf, conversation_key_tokens
from mlxcache.store.reply_rows import ReplyRow
from mlxcache.store.sessions import ANY_OWNER, Sessions, Turn, id_of
from mlxcache.store.snapshot_format import SessionInfo
from mlxcache.types import token_ids

HEAD = list(range(1000, 1030))


@pytest.fixture(params=["disk", "memory"])
def database(request, tmp_path):
    database = Database.open(tmp_path) if request.param == "disk" else TemporaryDatabase()
    yield database
    database.close()


@pytest.fixture
def sessions(database):
    return Sessions(database)


def turn(text, reply=(1, 2, 3), *, head=HEAD, first=8, namespace="n", at=1.0, **more):
    """A request of a head and message tokens, of which `first` are the first message."""
    ids = token_ids([*head, *text, *reply])
    marks = [len(head), len(head) + first] if head else [first]
    prompt = len(head) + len(text)
    key, at_head = conversation_key_tokens(marks, prompt), len(head)
    return Turn(namespace, "model", ids, prompt, key, at_head, at, **more)


def talk(start, count=20):
    return list(range(start, start + count))


@pytest.mark.parametrize("owner", [ANY_OWNER, "me", None])
def test_a_page_costs_the_same_with_ten_times_the_sessions(sessions, database, owner):
    """Also of an owner who was away since; pinned or not; counted in steps of SQLite."""
    steps = []
    for many in (60, 600):
        for n in range(many):
            whose = "me" if n < 12 else None if n % 2 else "you"
            one = turn(talk(n), label=f"{many} {n}", at=float(n), owner=whose)
            id = sessions.record_turn(one)
            sessions.update(id, pinned=n % 7 == 0)
        with database.read() as db:
            counted = count()
            db.set_progress_handler(lambda counted=counted: next(counted) * 0, 1)
        found = sessions.listed(sessions.all(10, owner))
        with database.read() as db:
            db.set_progress_handler(None, 1)
        assert len(found) == 10
        assert found == sorted(found, key=lambda one: (-one.session.last_used_at, one.session.id))
        steps.append(next(counted))
    assert steps[1] < 1.5 * steps[0]


def test_turns_of_a_conversation_are_one_session(sessions):
    for label in (None, "mine"):
        text = talk(0 if label else 5000)
        first = sessions.record_turn(
            turn(text, label=label, at=1.0, title="Fix it", client="cli/1")
        )
        text += [1, 2, 3, *talk(100)]
        assert sessions.record_turn(turn(text, label=label, at=2.0, title="Fix it")) == first
        row = sessions.get(first)
        assert (row.turns, row.label, row.title, row.client) == (2, label, "Fix it", "cli/1")
        assert (row.created_at, row.last_used_at) == (1.0, 2.0)
        [leaf] = sessions.leaves(first)
        assert leaf.ids.tolist() == [*HEAD, *text, 1, 2, 3]
        assert leaf.prompt_tokens == len(HEAD) + len(text)
    assert sessions.count() == 2


def test_another_conversation_under_the_same_head_is_another_session(sessions):
    one = sessions.record_turn(turn(talk(0)))
    assert sessions.record_turn(turn(talk(500))) != one
    assert sessions.record_turn(turn(talk(0), namespace="other")) != one
    assert sessions.count() == 3


def test_chats_behind_the_same_written_message_are_told_apart_by_their_titles(sessions):
    """Such as aider's examples: their first message is the same, and what was typed is not."""
    chats = {title: talk(at) for title, at in (("Fix it", 500), ("Add a test", 600))}
    made = {}
    for title, text in chats.items():
        made[title] = sessions.record_turn(turn([*talk(0, 8), *text], title=title))
    assert len(set(made.values())) == 2
    for title, text in chats.items():
        more = turn([*talk(0, 8), *text, 1, 2, 3, *talk(900)], title=title)
        assert sessions.record_turn(more) == made[title]
        assert sessions.get(made[title]).title == title
    [leaf] = sessions.leaves(made["Fix it"])
    assert leaf.ids.tolist() == [*HEAD, *talk(0, 8), *chats["Fix it"], 1, 2, 3, *talk(900), 1, 2, 3]


def test_a_changed_first_message_with_the_same_title_continues_its_session(sessions):
    """A reminder that only the newest message has; later turns find the new first message.

    Not after another head, nor with a prompt that did not grow, nor under a label.
    """
    first = sessions.record_turn(turn(talk(0, 8), first=8, title="Fix it"))
    other = turn(talk(50, 9), first=9, head=[7, *HEAD], title="Fix it")
    assert sessions.record_turn(other) != first
    shorter = turn(talk(70, 8), first=8, title="Fix it")
    assert sessions.record_turn(shorter) != first
    text = [*talk(0, 4), 1, 2, 3, *talk(100)]
    for _ in range(2):
        now = turn(text, first=4, title="Fix it")
        assert sessions.record_turn(now) == first
        [leaf] = sessions.leaves(first)
        assert (leaf.ids.tolist(), leaf.key_tokens) == (now.ids.tolist(), len(HEAD) + 4)
        text += [1, 2, 3, *talk(300)]
    assert sessions.record_turn(turn(text, first=4, title="Add a test")) != first
    labelled = turn([*talk(80, 8), *talk(200, 300)], first=8, title="Fix it", label="L")
    assert sessions.record_turn(labelled) == id_of("n", "L")


def test_a_text_that_grows_is_one_session(sessions):
    one = turn(talk(0, 4), head=[], first=4, title="Once")
    id = sessions.record_turn(one)
    grown = turn([*talk(0, 4), 1, 2, 3, 4], head=[], first=8, title="Once upon")
    assert sessions.record_turn(grown) == id


def test_a_label_keeps_its_id_and_collects_its_agents(sessions):
    main = turn([*talk(0), *talk(100, 200)], label="L", at=1.0)
    id = sessions.record_turn(main)
    assert id == id_of("n", "L")
    agent = turn(talk(500), head=[9, 9, 9], label="L", at=2.0)
    assert sessions.record_turn(agent) == id
    assert sessions.record_turn(turn(talk(700), head=[], label="L", at=3.0, title="A title")) == id
    leaves = sessions.leaves(id)
    assert [leaf.kind for leaf in leaves] == ["main", "agent", "agent"]
    assert leaves[0].ids.tolist() == main.ids.tolist()
    assert sessions.get(id).title is None
    sessions.record_turn(turn([*talk(500), 1, 2, 3, 4], head=[9, 9, 9], label="L", at=4.0))
    assert [leaf.turns for leaf in sessions.leaves(id)] == [1, 2, 1]


def test_a_title_request_that_comes_first_yields_to_the_conversation(sessions):
    id = sessions.record_turn(turn(talk(0, 9), head=[], label="L", title="Write a title"))
    sessions.record_turn(turn([*talk(50), *talk(100, 200)], label="L", title="Fix the bug"))
    assert sessions.get(id).title == "Fix the bug"
    assert [len(leaf.ids) for leaf in sessions.leaves(id)] == [253, 12]


def test_labels_that_share_a_prefix_stay_apart(sessions):
    one, two = (sessions.record_turn(turn(talk(0), label=label)) for label in ("a", "b"))
    assert one != two
    assert sessions.count() == 2


def test_an_id_is_a_label_too(sessions):
    id = sessions.record_turn(turn(talk(0)))
    fork = sessions.fork(id, 5.0, "try")
    assert sessions.record_turn(turn([*talk(0), 1, 2, 3, 4], label=fork)) == fork
    assert len(sessions.leaves(id)[0].ids) < len(sessions.leaves(fork)[0].ids)


def test_ids_are_kept_in_parts_and_only_new_ones_are_written(sessions, database, monkeypatch):
    monkeypatch.setattr(session_rows, "PART_TOKENS", 16)
    text = talk(0, 40)
    id = sessions.record_turn(turn(text, label="L"))
    with database.read() as db:
        before = db.execute("SELECT start, ids FROM leaf_tokens ORDER BY start").fetchall()
    for tail in ([1, 2, 3, *talk(200, 50)], [], talk(300, 7), [1]):
        now = turn(text + tail, label="L")
        sessions.record_turn(now)
        assert sessions.leaves(id)[0].ids.tolist() == now.ids.tolist()
        [leaf] = sessions.sharing("n", now.ids)
        assert sessions.sharing("n", now.ids) == {leaf: len(now.ids)}
        assert sessions.ids(leaf).tolist() == now.ids.tolist()
    with database.read() as db:
        after = db.execute("SELECT start, ids FROM leaf_tokens ORDER BY start").fetchall()
    assert after[:4] == before[:4]


def test_a_conversation_whose_first_turn_was_short_is_main_again(sessions):
    """A large sub-agent before its second turn, or a repeated title request, stays aside."""
    for label, goes_on in (("L", True), ("M", False)):
        text = talk(0 if goes_on else 9000)
        id = sessions.record_turn(turn(text, label=label, at=1.0, title="Fix it"))
        agent = turn(talk(500, 900), head=[9, 9, 9], label=label, at=2.0, title="Search")
        sessions.record_turn(agent)
        assert sessions.leaves(id)[0].ids.tolist() == agent.ids.tolist()
        again = turn([*text, 1, 2, 3, *talk(100)] if goes_on else text, label=label, at=3.0)
        sessions.record_turn(replace(again, title="Fix it"))
        main = sessions.leaves(id)[0]
        assert main.ids.tolist() == (again if goes_on else agent).ids.tolist()
        assert sessions.get(id).title == ("Fix it" if goes_on else "Search")


def test_after_a_compaction_the_new_prefix_becomes_the_main_one(sessions):
    """Once it has gone on for some turns under the same head."""
    old = turn(talk(0, 400), label="L", title="Fix it")
    id = sessions.record_turn(old)
    for head, start in (([9, 9, 9], 7000), (HEAD, 3000)):
        text = talk(start, 20)
        for _ in range(SETTLED_TURNS):
            assert sessions.leaves(id)[0].ids.tolist() == old.ids.tolist()
            sessions.record_turn(turn(text, label="L", head=head))
            text += [1, 2, 3, *talk(start + 500, 5)]
    assert sessions.leaves(id)[0].ids.tolist()[: len(HEAD) + 20] == [*HEAD, *talk(3000, 20)]


def test_fork_copies_the_main_leaf_or_its_beginning(sessions):
    id = sessions.record_turn(turn(talk(0), label="L", title="T"))
    whole, part = sessions.fork(id, 9.0, "copy"), sessions.fork(id, 9.0, tokens=12)
    row = sessions.get(whole)
    assert (row.label, row.name, row.title, row.pinned, row.created_at) == (
        *(None, "copy", "T"),
        *(False, 9.0),
    )
    assert sessions.leaves(whole)[0].ids.tolist() == sessions.leaves(id)[0].ids.tolist()
    [leaf] = sessions.leaves(part)
    assert (len(leaf.ids), leaf.prompt_tokens, leaf.kind) == (12, 12, "main")
    for bad in (0, 54):
        with pytest.raises(BadRequest, match="at_tokens"):
            sessions.fork(id, 9.0, tokens=bad)
    with pytest.raises(NotFound):
        sessions.fork("ses_nothing", 9.0)


def test_names_and_pins_can_be_changed_and_taken_back(sessions):
    id = sessions.record_turn(turn(talk(0)))
    sessions.update(id, name="mine")
    sessions.update(id, pinned=True)
    assert (sessions.get(id).name, sessions.get(id).pinned) == ("mine", True)
    assert sessions.pinned() == [id]
    sessions.update(id, name="", pinned=False)
    assert (sessions.get(id).name, sessions.get(id).pinned) == (None, False)
    with pytest.raises(NotFound):
        sessions.update("ses_nothing", name="x")


def test_no_name_is_longer_than_the_limit_whichever_way_it_comes(sessions):
    id = sessions.record_turn(turn(talk(0)))
    many = "x" * 201
    for refused in (
        lambda: sessions.update(id, name=many),
        lambda: sessions.fork(id, 9.0, many),
        lambda: sessions.adopt(from_file(id), 9.0, many),
        lambda: sessions.adopt(from_file(id, name=many), 9.0),
    ):
        with pytest.raises(BadRequest, match="at most 200 characters"):
            refused()
    assert [one.id for one in sessions.all()] == [id]
    made = sessions.fork(id, 9.0, " a\x1b\n b"), sessions.adopt(from_file(id, name="a\rb"), 9.0)
    assert [sessions.get(one).name for one in made] == ["a b", "a b"]


def test_deleting_leaves_no_rows_and_says_what_others_need(sessions, database):
    id, other = (sessions.record_turn(turn(talk(n))) for n in (0, 500))
    ids = sessions.leaves(id)[0].ids
    assert sorted(sessions.sharing("n", ids).values()) == [len(HEAD), len(ids)]
    sessions.delete(id)
    assert list(sessions.sharing("n", ids).values()) == [len(HEAD)]
    assert sessions.sharing("m", ids) == {}
    with pytest.raises(NotFound):
        sessions.get(id)
    assert [row.id for row in sessions.all()] == [other]
    with database.read() as db:
        count = "SELECT count(*) FROM leaf_tokens WHERE leaf NOT IN (SELECT id FROM leaves)"
        assert db.execute(count).fetchone() == (0,)


def test_clear_spares_what_is_pinned_unless_told(sessions):
    ids = [sessions.record_turn(turn(talk(n))) for n in (0, 500, 900)]
    sessions.update(ids[0], pinned=True)
    assert sessions.clear() == 2
    assert sessions.clear(pinned=True) == 1
    assert sessions.all() == []


def test_the_list_is_by_last_use(sessions):
    ids = [sessions.record_turn(turn(talk(n * 100), at=float(n))) for n in range(3)]
    assert [row.id for row in sessions.all()] == ids[::-1]
    assert [row.id for row in sessions.all(limit=1)] == [ids[2]]


def test_what_is_used_least_recently_goes_beyond_the_limits(sessions, monkeypatch):
    monkeypatch.setattr(session_rows, "MOST_SESSIONS", 2)
    monkeypatch.setattr(session_rows, "MOST_LEAVES", 2)
    first = sessions.record_turn(turn(talk(0), label="L", at=1.0))
    sessions.update(first, pinned=True)
    for n in range(1, 5):
        sessions.record_turn(turn(talk(n * 100), label="L", head=[n], at=float(n + 1)))
    kept = sessions.leaves(first)
    assert [leaf.kind for leaf in kept] == ["main", "agent"]
    assert kept[1].ids[0] == 4
    for n in range(10, 14):
        sessions.record_turn(turn(talk(n * 100), at=float(n)))
    assert [row.last_used_at for row in sessions.all()] == [13.0, 12.0, 5.0]


def test_rows_survive_the_process(tmp_path):
    database = Database.open(tmp_path)
    id = Sessions(database).record_turn(turn(talk(0), label="L"))
    database.close()
    again = Sessions(Database.open(tmp_path))
    assert again.get(id).turns == 1
    assert again.record_turn(turn([*talk(0), 1, 2, 3, 4], label="L")) == id
    assert len(again.leaves(id)) == 1


def test_a_temporary_database_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    database = TemporaryDatabase()
    Sessions(database).record_turn(turn(talk(0)))
    assert list(tmp_path.iterdir()) == []
    database.close()
    with pytest.raises(StoreError, match="is closed"), database.read():
        pass


def from_file(id, **more):
    leaf = Leaf(token_ids([*HEAD, *talk(0)]), prompt_tokens=40, key_tokens=40)
    return SessionInfo(id, "n", "model", (leaf,), **more)


@pytest.mark.parametrize("id", ["../../x", 'ses_1"; filename="x', "ses_\r\nX: y", "ses_é", "", "x"])
def test_a_file_cannot_bring_an_id_that_is_more_than_one(sessions, id):
    made = sessions.adopt(from_file(id), 1.0)
    assert made != id
    assert made.startswith("ses_")
    assert sessions.adopt(from_file("ses_0a1b2c"), 1.0) == "ses_0a1b2c"


def test_nobody_takes_the_id_that_anothers_label_will_have(sessions):
    """An id in a file is chosen by its writer, and that of a label can be computed."""
    wanted = id_of("n", "work", "alice")
    assert sessions.adopt(from_file(wanted), 1.0, owner="bob") != wanted
    assert sessions.adopt(from_file(wanted), 1.0) == wanted
    made = sessions.record_turn(turn(talk(0), label="work", owner="alice"))
    assert made != wanted
    assert sessions.record_turn(turn(talk(0), label="work", owner="alice")) == made
    assert [one.id for one in sessions.all(owner="alice")] == [made]


@pytest.mark.parametrize("owner", [None, "bob"])
def test_a_session_of_a_file_has_the_id_that_its_label_gets_here(sessions, owner):
    """Which is what the log calls it; a second one with this label loses it."""
    wanted = id_of("n", "notes", owner)
    assert sessions.adopt(from_file("ses_0a1b2c", label="notes"), 1.0, owner=owner) == wanted
    assert sessions.record_turn(turn(talk(0), label="notes", owner=owner)) == wanted
    again = sessions.adopt(from_file(wanted, label="notes"), 1.0, owner=owner)
    assert again != wanted
    assert [one.label for one in sessions.all(owner=owner) if one.id == again] == [None]


def test_one_owners_replies_are_not_anothers(sessions):
    reply = ReplyRow(b"d", 1, "t", b"h", token_ids([1]), True, False, False, None)
    for owner in ("alice", None):
        sessions.record_turn(replace(turn(talk(0), label="work", owner=owner), reply=reply))
    found, _ = sessions.replies("n")
    assert {owner: len(rows) for owner, rows in found.items()} == {"alice": 1, None: 1}
