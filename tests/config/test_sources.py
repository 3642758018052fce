"""Flags win over the environment, which wins over the file, which wins over the defaults."""

import os
from pathlib import Path

import pytest

from mlxcache.config import SETTINGS, Settings, load_settings, unknown_variables
from mlxcache.errors import ConfigError


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user whose configuration directory is empty."""
    monkeypatch.setattr("mlxcache.config.sources.default_config_path", lambda: tmp_path / "c.toml")
    return tmp_path


def write(home: Path, text: str) -> Path:
    path = home / "c.toml"
    path.write_text(text)
    return path


def test_every_source_wins_over_the_next(home):
    """One setting from each of flag, variable, file and default."""
    write(home, "port = 1\ncontext = 100\nconcurrency = 3\n")
    settings = load_settings({"port": 2, "model": None}, {"MLXCACHE_PORT": "9"})
    assert (settings.port, settings.context, settings.concurrency) == (2, 100, 3)
    assert load_settings({}, {"MLXCACHE_PORT": "9"}).port == 9
    assert settings.queue == Settings().queue


def test_every_setting_has_a_reader():
    """So each has its variable and its key."""
    assert set(SETTINGS) == set(Settings.__dataclass_fields__)


VALUES = {
    "model": ("org/name", "org/name"),
    "host": ("localhost", "localhost"),
    "port": ("9000", 9000),
    "cache_dir": ("/c", Path("/c")),
    "record": ("/c", Path("/c")),
    "ram": ("8GB", "8GB"),
    "disk": ("OFF", "off"),
    "context": ("4096", 4096),
    "max_tokens": ("99", 99),
    "concurrency": ("2", 2),
    "queue": ("0", 0),
    "request_timeout": ("90.5", 90.5),
    "prefill_chunk": ("512", 512),
    "api_key": ("key", ("key",)),
    "api_keys_file": ("/keys", Path("/keys")),
    "allow_origin": ("http://localhost:3000", ("http://localhost:3000",)),
    "insecure": ("true", True),
    "adapter": ("lora", "lora"),
    "kv_bits": ("4", 4),
    "draft_model": ("org/small", "org/small"),
    "num_draft_tokens": ("5", 5),
    "chat_template_args": ('{"enable_thinking": false}', {"enable_thinking": False}),
    "canonicalise": ("git_status=on,uuid=off", {"git_status": True, "uuid": False}),
    "no_canonicalise": ("yes", True),
    "no_anticipate": ("true", True),
    "trust_remote_code": ("1", True),
    "log_level": ("DEBUG", "debug"),
    "warm": (__file__, (Path(__file__),)),
}

OTHERS = {"MLXCACHE_MODEL": "org/name", "MLXCACHE_DRAFT_MODEL": "org/small"}
"""What some settings need beside them."""


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_setting_can_come_from_the_environment(home, name):
    """Text is turned into the setting's type."""
    text, value = VALUES[name]
    environ = OTHERS | {"MLXCACHE_" + name.upper(): text}
    assert getattr(load_settings({}, environ), name) == value


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_every_setting_can_come_from_the_file(home, name):
    """TOML has types of its own; a table needs no JSON."""
    text, value = VALUES[name]
    if isinstance(value, bool):
        line = f"{name} = {str(value).lower()}"
    elif isinstance(value, int):
        line = f"{name} = {value}"
    elif isinstance(value, dict):
        pairs = ", ".join(f"{key} = {str(state).lower()}" for key, state in value.items())
        line = f"{name} = {{ {pairs} }}"
    else:
        line = f'{name} = "{text}"'
    write(home, line)
    environ = {k: v for k, v in OTHERS.items() if k != "MLXCACHE_" + name.upper()}
    assert getattr(load_settings({}, environ), name) == value


def test_an_unknown_key_is_named_with_its_file(home):
    """A typing error must not be silently without effect."""
    path = write(home, "prot = 1")
    with pytest.raises(ConfigError) as raised:
        load_settings({}, {})
    assert "'prot'" in str(raised.value)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("port", "eighty"),
        ("port", "70000"),
        ("context", "3"),
        ("context", "-1"),
        ("concurrency", "0"),
        ("ram", "8 parsecs"),
        ("disk", "lots"),
        ("insecure", "maybe"),
        ("log_level", "loud"),
        ("chat_template_args", "[1]"),
        ("chat_template_args", "{"),
        ("kv_bits", "5"),
        ("kv_bits", "true"),
        ("num_draft_tokens", "0"),
        ("num_draft_tokens", "16"),
    ],
)
def test_a_wrong_value_is_named_by_where_it_came_from(home, name, text):
    """The same mistake as a flag, a variable and a key."""
    flag, variable = "--" + name.replace("_", "-"), "MLXCACHE_" + name.upper()
    with pytest.raises(ConfigError, match=flag):
        load_settings({name: text}, {})
    with pytest.raises(ConfigError, match=variable):
        load_settings({}, {variable: text})
    path = write(home, f"{name} = '{text}'")
    with pytest.raises(ConfigError) as raised:
        load_settings({}, {})
    assert f"{name} in {path}" in str(raised.value)


def test_a_wrong_disk_is_told_of_off():
    """And a wrong RAM is not: there is no serving without."""
    for text in ("lots", "0", "150%"):
        with pytest.raises(ConfigError, match=r"--disk: .*; or off, for none"):
            load_settings({"disk": text}, {})
        with pytest.raises(ConfigError, match="--ram: ") as raised:
            load_settings({"ram": text}, {})
        assert "off" not in str(raised.value)


def test_booleans_are_no_numbers_and_lists_no_texts(home):
    """TOML's types are held to."""
    for line in ("port = true", "port = 1.5", "host = ['a']", "ram = 0.5", "api_key = 5"):
        write(home, line)
        with pytest.raises(ConfigError):
            load_settings({}, {})


def test_a_wrong_key_is_refused_without_repeating_it(home):
    """The sentence goes to the terminal and to logs."""
    with pytest.raises(ConfigError) as raised:
        load_settings({"api_key": "sécret"}, {})
    assert "cret" not in str(raised.value)


def test_a_named_file_must_exist_and_be_toml(home):
    """The default file may be missing, one that was asked for may not."""
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings({}, {}, home / "none.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings({}, {"MLXCACHE_CONFIG": str(home / "none.toml")})
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_settings({}, {}, write(home, "port = = 1"))


def test_an_empty_variable_is_not_set(home):
    """As shells and service files write it."""
    assert load_settings({}, {"MLXCACHE_PORT": ""}).port == 8081


def test_files_to_warm_can_be_many_and_must_be_there(home):
    """From a variable, a list in the file, or a flag that is repeated."""
    one, two = home / "one", home / "two"
    for file in (one, two):
        file.write_text("x")
    assert load_settings({}, {"MLXCACHE_WARM": f"{one}{os.pathsep}{two}"}).warm == (one, two)
    assert load_settings({"warm": [str(two)]}, {"MLXCACHE_WARM": str(one)}).warm == (two,)
    assert load_settings({}, {}, write(home, f'warm = ["{one}", "{two}"]')).warm == (one, two)
    with pytest.raises(ConfigError, match=r"--warm: there is no file .*three"):
        load_settings({"warm": [str(home / "three")]}, {})
    with pytest.raises(ConfigError, match=r"warm in .*list of files"):
        load_settings({}, {}, write(home, "warm = 3"))


def test_unknown_variables_are_told_with_the_nearest_known():
    """Of ours alone; an empty one counts as not set."""
    environ = dict.fromkeys(("MLXCACHE_CONTEX", "MLXCACHE_CONFG", "MLXCACHE_WHATEVER"), "1")
    known = {"MLXCACHE_" + name.upper(): "1" for name in (*SETTINGS, "config", "more")}
    others = {"MLX_LM_URL": "1", "PATH": "1", "MLXCACHE_PROT": ""}
    assert unknown_variables(environ | known | others, ["MLXCACHE_MORE"]) == [
        ("MLXCACHE_CONFG", "MLXCACHE_CONFIG"),
        ("MLXCACHE_CONTEX", "MLXCACHE_CONTEXT"),
        ("MLXCACHE_WHATEVER", None),
    ]
