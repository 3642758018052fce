"""Several models in flags, variables and config.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxcache.config import Settings, load_settings
from mlxcache.config.models import ModelEntry, Route
from mlxcache.errors import ConfigError

TABLES = """
context = 5000
[models.large]
path = "org/large"
aliases = "gpt-5"
keep = "always"
draft_model = "org/draft"
[models.small]
path = "~/small"
aliases = ["s", "tiny"]
context = 2000
keep = "idle 10m"
ram = "25%"
adapter = "lora"
chat_template_args = { enable_thinking = false }
"""
LARGE = ModelEntry(
    "org/large", name="large", aliases=("gpt-5",), keep="always", draft_model="org/draft"
)
SMALL = ModelEntry(
    "~/small",
    name="small",
    aliases=("s", "tiny"),
    context=2000,
    keep=600.0,
    ram="25%",
    adapter="lora",
    chat_template_args={"enable_thinking": False},
)


@pytest.fixture
def write(tmp_path: Path):
    """Write config.toml and return its path."""

    def write_text(text: str = TABLES) -> Path:
        path = tmp_path / "c.toml"
        path.write_text(text)
        return path

    return write_text


def test_a_repeated_flag_and_a_list_are_several_models(write):
    two = (ModelEntry("org/a"), ModelEntry("b,c"))
    for settings in (
        load_settings({"model": ["org/a", "b,c"]}, {"MLXCACHE_MODEL": "x"}, write("")),
        load_settings({}, {}, write('model = ["org/a", "b,c"]')),
    ):
        assert settings.model == "org/a"
        assert settings.models == settings.entries == two
    one = load_settings({}, {"MLXCACHE_MODEL": "b,c"}, write("context = 99"))
    assert (one.model, one.models) == ("b,c", ())
    assert one.entries == (ModelEntry("b,c", context=99),)
    assert load_settings({"model": ["a"]}, {}, write("")).model == "a"


def test_one_model_is_an_entry_made_of_the_settings():
    assert Settings().entries == (ModelEntry(None),)
    fields: dict[str, Any] = {
        "context": 99,
        "adapter": "lora",
        "draft_model": "d",
        "chat_template_args": {"a": 1},
    }
    assert Settings(model="m", **fields).entries == (ModelEntry("m", **fields),)


def test_tables_are_models_in_their_order(write):
    settings = load_settings({}, {}, write())
    assert settings.models == (LARGE, SMALL)
    assert settings.model == "org/large"
    large, small = map(settings.for_model, settings.entries)
    assert (large.model, large.context, large.draft_model) == ("org/large", 5000, "org/draft")
    assert (large.adapter, dict(large.chat_template_args)) == (None, {})
    assert (small.model, small.context, small.draft_model) == ("~/small", 2000, None)
    assert (small.adapter, small.chat_template_args) == ("lora", {"enable_thinking": False})
    assert (large.entries, small.entries) == ((LARGE,), (SMALL,))
    assert settings.for_request("TINY") == small
    assert settings.for_request("other") == settings.for_request(None) == large


def test_the_flag_chooses_tables(write):
    """By any of their names; others are paths or Hub ids, and routes to what is left out go."""
    path = write('route = ["a*=large", "b*=tiny"]' + TABLES)
    alone = load_settings({"model": ["tiny"]}, {}, path)
    assert alone.entries == (SMALL,)
    assert (alone.model, alone.context, alone.adapter) == ("~/small", 2000, "lora")
    assert alone.route == (Route("b*", "tiny"),)
    both = load_settings({"model": ["small", "org/large", "org/new"]}, {}, path)
    assert both.entries == (SMALL, LARGE, ModelEntry("org/new"))
    assert both.route == (Route("a*", "large"), Route("b*", "tiny"))
    other = load_settings({}, {"MLXCACHE_MODEL": "org/new"}, path)
    assert (other.model, other.models, other.route) == ("org/new", (), ())


def test_flags_and_variables_override_tables(write):
    settings = load_settings({"context": "64"}, {"MLXCACHE_CHAT_TEMPLATE_ARGS": "{}"}, write())
    assert [settings.for_model(one).context for one in settings.entries] == [64, 64]
    assert [dict(settings.for_model(one).chat_template_args) for one in settings.entries] == [
        {},
        {},
    ]
    alone = load_settings({"model": "small", "adapter": "other"}, {}, write())
    assert alone.adapter == alone.entries[0].adapter == "other"


def test_an_adapter_or_draft_for_several_models_is_refused(write):
    for name in ("adapter", "draft_model"):
        with pytest.raises(ConfigError, match=rf"{name} in the table \[models.NAME\]"):
            load_settings({"model": ["a", "b"], name: "x"}, {}, write(""))
        with pytest.raises(ConfigError, match=rf"{name} in the table \[models.NAME\]"):
            load_settings({}, {}, write(f'{name} = "x"\n{TABLES}'))


def test_tokens_to_draft_need_a_draft_model_of_any_table(write):
    assert load_settings({"num_draft_tokens": "5"}, {}, write()).num_draft_tokens == 5
    with pytest.raises(ConfigError, match="needs a draft model"):
        load_settings({"num_draft_tokens": "5", "model": ["small"]}, {}, write())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models = 3", "models in FILE: must have a table"),
        ("[models]", "models in FILE: must have a table"),
        ("[models]\na = 3", "models in FILE: a must be a table"),
        ("[models.a]", "models in FILE: a has no path"),
        ("[models.a]\npath = ''", "models in FILE: path of a must be a text"),
        ("[models.a]\npath = 'p'\npth = 1", "models in FILE: unknown key 'pth' in a; .* aliases"),
        ("[models.q2.5]\npath = 'p'", r'unknown key \'5\' in q2.*\[models."q2.5"\]'),
        ("[models.a]\npath = 'p'\nkeep = 'often'", "keep of a must be always, demand, or idle"),
        ("[models.a]\npath = 'p'\nkeep = '10m'", "keep of a must be always, demand, or idle"),
        ("[models.a]\npath = 'p'\nram = 'auto'", "ram of a must be a size such as 8GB or 50%"),
        ("[models.a]\npath = 'p'\nram = '8'", "ram of a .*: did you mean 8GB"),
        ("[models.a]\npath = 'p'\nram = 8", "ram of a .*: did you mean 8GB"),
        ("[models.a]\npath = 'p'\nram = '150%'", "ram of a must be a percentage .* at most 100%"),
        ("[models.a]\npath = 'p'\ncontext = 1", "context of a must be a number of at least 16"),
        ("[models.a]\npath = 'p'\naliases = [1]", "aliases of a must be a text"),
        ("[models.a]\npath = 'p'\n[models.A]\npath = 'q'", "models in FILE: two models .* 'a'"),
        (
            "[models.a]\npath = 'p'\n[models.b]\npath = 'q'\naliases = 'A'",
            "models in FILE: two models .* 'a': a and b",
        ),
        ("model = 'a'\n[models.a]\npath = 'p'", r"model in FILE: leave it out beside \[models\]"),
        ("model = ['a', 'a']", "model in FILE: names a twice"),
        ("model = []", "model in FILE: must name a model"),
        ("model = 5", "model in FILE: must be a text"),
        ("[model.a]\npath = 'p'", r"model in FILE: .* did you mean \[models\.a\]\?"),
        ("[model]\npath = 'p'", r"model in FILE: .* did you mean \[models\.NAME\]\?"),
        (
            "route = ['x*=b']\n[models.a]\npath = 'p'",
            r"route in FILE: x\*=b: .* no model 'b'; the models are a$",
        ),
        ("route = 'x*=b'", "route in FILE: .* no model 'b'; the models are mlxcache-demo"),
        ("route = ['x*']", "route in FILE: must be PATTERN=NAME"),
        ("route = 5", "route in FILE: must be PATTERN=NAME"),
        ("idle_unload = '10 parsecs'", "idle_unload in FILE: must be a duration .*; or off"),
    ],
)
def test_mistakes_in_the_file_are_named(write, text, message):
    path = write(text)
    with pytest.raises(ConfigError, match=message.replace("FILE", str(path))):
        load_settings({}, {}, path)


def test_mistakes_in_flags_are_named(write):
    with pytest.raises(ConfigError, match="--model: two models have the name 'a/x'"):
        load_settings({"model": ["a/x", "A/X"]}, {}, write(""))
    with pytest.raises(ConfigError, match=r"--route: x\*=large: there is no model 'large'"):
        load_settings({"model": ["small"], "route": ["x*=large"]}, {}, write())
    with pytest.raises(ConfigError, match="--idle-unload: must be a duration"):
        load_settings({"idle_unload": "-1"}, {}, write(""))


def test_routes_have_three_forms(write):
    expected = (Route("b-*", "large"), Route("a=*", "small"))
    text = "b-*=large,a=*=small"
    for settings in (
        load_settings({"route": text.split(",")}, {}, write()),
        load_settings({}, {"MLXCACHE_ROUTE": text}, write()),
        load_settings({}, {}, write('[route]\n"b-*" = "large"\n"a=*" = "small"\n' + TABLES[16:])),
    ):
        assert settings.route == expected
        assert settings.for_request("b-1").model == "org/large"
        assert settings.for_request("a=1").model == "~/small"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("15m", 900), ("1.5 h", 5400), ("1D", 86400), ("off", None)],
)
def test_the_idle_time_has_units(write, text, seconds):
    assert load_settings({"idle_unload": text}, {}, write("")).idle_unload == seconds
    assert load_settings({}, {}, write(f"idle_unload = '{text}'")).idle_unload == seconds


@pytest.mark.parametrize("text", ["0", "", "m", "1.2.3", "nan", "-5", "31d", "1w", "true"])
def test_what_is_no_duration_is_refused(write, text):
    with pytest.raises(ConfigError, match="idle_unload"):
        load_settings({}, {}, write(f"idle_unload = '{text}'"))
    assert load_settings({}, {}, write("idle_unload = false")).idle_unload is None


def test_a_model_stays_loaded_as_its_table_says_or_else_the_setting():
    entries = (LARGE, SMALL, ModelEntry("b", name="b", keep="demand"), ModelEntry("c"))
    idle = Settings(models=entries, idle_unload=60.0)
    assert [idle.keep_for(one) for one in entries] == ["always", 600.0, "demand", 60.0]
    assert Settings().keep_for(ModelEntry("c")) == "demand"


def test_settings_made_in_code_are_checked_too():
    assert Settings(models=(LARGE, SMALL)).model == "org/large"
    with pytest.raises(ConfigError, match="two models"):
        Settings(models=(LARGE, LARGE))
    with pytest.raises(ConfigError, match="--route a=b: there is no model 'b'"):
        Settings(models=(LARGE,), route=(Route("a", "b"),))
    with pytest.raises(ConfigError, match="first of models"):
        Settings(model="org/small", models=(LARGE,))
