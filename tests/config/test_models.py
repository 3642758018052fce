"""Several models: their entries, and the choice of one by a request's model name."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcache.config.models import (
    DEMO_ID,
    ModelEntry,
    Route,
    check_names,
    check_routes,
    match_model,
    model_id,
)
from mlxcache.errors import ConfigError

ENTRIES = (
    ModelEntry("org/Large", name="large", aliases=("gpt-5", "Planner")),
    ModelEntry("org/small", name="small"),
    ModelEntry("org/third", name="org/Small"),
)


@pytest.mark.parametrize(
    ("requested", "index"),
    [
        (None, 0),
        ("", 0),
        ("small", 1),
        ("org/small", 1),
        ("org/Small", 2),
        ("ORG/SMALL", 2),
        ("planner", 0),
        ("SMALL", 1),
        ("claude-haiku-4-5", 1),
        ("Claude-Haiku-5", 1),
        ("claude-opus-4", 2),
        ("current-model", 0),
    ],
)
def test_a_request_gets_the_model_that_it_names(requested, index):
    """Names precede ids and aliases, exact ones those in another case, and all of them routes."""
    given = {"claude-haiku-*": "small", "claude-*": "org/Small", "small": "large"}
    routes = tuple(Route(*pair) for pair in given.items())
    assert match_model(requested, ENTRIES, routes) == index


NAMES = st.text("aAbB/", min_size=1, max_size=3)
MODELS = st.lists(
    st.builds(
        ModelEntry,
        NAMES.map("org/{}".format),
        name=st.none() | NAMES,
        aliases=st.lists(NAMES, max_size=2).map(tuple),
    ),
    min_size=1,
    max_size=4,
)
ROUTES = st.lists(st.builds(Route, st.text("aAbB*?[]", min_size=1, max_size=3), NAMES), max_size=3)


@given(NAMES | st.none(), MODELS, ROUTES)
def test_the_choice_is_explained_by_a_name_a_route_or_the_default(requested, entries, routes):
    chosen = entries[match_model(requested, entries, routes)]
    if requested is None:
        assert chosen is entries[0]
        return
    exact = [one for one in entries if requested in one.names]
    folded = [one for one in entries if requested.lower() in map(str.lower, one.names)]
    if exact or folded:
        assert chosen in (exact or folded)
        named = [one for one in entries if one.name == requested]
        assert not named or chosen is named[0]
        assert match_model(requested, entries, ()) == match_model(requested, entries, routes)
        return
    matching = [one for one in routes if fnmatchcase(requested.lower(), one.pattern.lower())]
    if matching:
        assert match_model(requested, entries, routes) == match_model(matching[0].name, entries)
    else:
        assert chosen is entries[0]


def test_the_name_that_clients_see(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    cached = tmp_path / "models--owner--some-name" / "snapshots" / "0123abcd"
    folder.mkdir()
    cached.mkdir(parents=True)
    assert model_id(f"{folder}/") == ModelEntry(f"{folder}/").label == "my-model"
    assert model_id("owner/name") == "owner/name"
    assert model_id(str(cached)) == "owner/some-name"
    assert ModelEntry(None).names == (DEMO_ID,)
    assert ModelEntry("owner/name", name="n").names == ("n", "owner/name")


def test_names_that_two_models_share_are_refused():
    """In any case; an adapter and its base share an id, which is no conflict."""
    base = ModelEntry("org/base", name="base")
    check_names([base, ModelEntry("org/base", name="tuned", adapter="lora", aliases=("t",))])
    for other in (
        ModelEntry("org/x", name="Base"),
        ModelEntry("org/x", name="x", aliases=("base",)),
        ModelEntry("org/x", aliases=("base",)),
    ):
        with pytest.raises(ConfigError, match="two models have the name 'base': base and"):
            check_names([base, other])


def test_a_route_to_no_model_is_refused():
    check_routes([Route("*", "gpt-5"), Route("*", "org/Large"), Route("*", "LARGE")], ENTRIES)
    with pytest.raises(ConfigError, match=r"a\*=tiny: there is no model 'tiny'; .* large, small"):
        check_routes([Route("a*", "tiny")], ENTRIES)


def test_the_demo_has_neither_adapter_nor_draft():
    with pytest.raises(ConfigError, match="--model"):
        ModelEntry(None, adapter="lora")
    with pytest.raises(ConfigError, match="--model"):
        ModelEntry(None, draft_model="d")
