"""Flags override the environment, which overrides the file, which overrides the defaults."""

import os
from pathlib import Path

import pytest

from mlxcache.config import SETTINGS, Settings, load_settings, unknown_variables
from mlxcache.config.models import Route
from mlxcache.config.remote import RemoteUrl
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


def test_every_source_overrides_the_next(home):
    write(home, "port = 1\ncontext = 100\nconcurrency = 3\n")
    settings = load_settings({"port": 2, "model": None}, {"MLXCACHE_PORT": "9"})
    assert (settings.port, settings.context, settings.concurrency) == (2, 100, 3)
    assert load_settings({}, {"MLXCACHE_PORT": "9"}).port == 9
    assert settings.queue == Settings().queue


def test_every_setting_has_one_entry():
    assert set(SETTINGS) == set(Settings.__dataclass_fields__)
    assert {name for name, setting in SETTINGS.items() if setting.only_key} == {"models"}
    for name, setting in SETTINGS.items():
        assert setting.name == name
        assert setting.flag == "--" + name.replace("_", "-")
        assert setting.variable == "MLXCACHE_" + name.upper()
        assert setting.help.endswith(".")


VALUES = {
    "model": ("org/name", "org/name"),
    "route": ("*-haiku-*=org/name", (Route("*-haiku-*", "org/name"),)),
    "idle_unload": ("15m", 900.0),
    "hosts": ("10.0.0.1,10.0.0.2", "10.0.0.1,10.0.0.2"),
    "hostfile": ("/hosts.json", Path("/hosts.json")),
    "pipeline": ("yes", True),
    "host": ("localhost", "localhost"),
    "port": ("9000", 9000),
    "cache_dir": ("/c", Path("/c")),
    "record": ("/c", Path("/c")),
    "ram": ("8GB", "8GB"),
    "disk": ("OFF", "off"),
    "wire": ("OFF", "off"),
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
    "speculate": ("AUTO", "auto"),
    "speculate_tokens": ("15", 15),
    "chat_template_args": ('{"enable_thinking": false}', {"enable_thinking": False}),
    "canonicalise": ("git_status=on,uuid=off", {"git_status": True, "uuid": False}),
    "no_canonicalise": ("yes", True),
    "no_anticipate": ("true", True),
    "no_loop_guard": ("true", True),
    "no_generation_config": ("1", True),
    "trust_remote_code": ("1", True),
    "log_level": ("DEBUG", "debug"),
    "keep_awake": ("off", False),
    "remote": ("s3://bucket/team/", RemoteUrl("s3", "bucket", "team")),
    "remote_key_file": ("/key", Path("/key")),
    "warm": (__file__, (Path(__file__),)),
}

assert set(VALUES) == set(SETTINGS) - {"models"}

OTHERS = {"MLXCACHE_MODEL": "org/name", "MLXCACHE_DRAFT_MODEL": "org/small"}
"""Other settings that some settings require."""

NEEDED = {
    "remote_key_file": {"MLXCACHE_REMOTE": "s3://bucket"},
    "speculate": {"MLXCACHE_DRAFT_MODEL": ""},
    "speculate_tokens": {"MLXCACHE_DRAFT_MODEL": "", "MLXCACHE_SPECULATE": "auto"},
}
"""Other settings that one setting requires, and that others contradict."""


@pytest.mark.parametrize("name", sorted(VALUES))
def test_every_setting_can_come_from_the_environment(home, name):
    text, value = VALUES[name]
    environ = OTHERS | NEEDED.get(name, {}) | {"MLXCACHE_" + name.upper(): text}
    assert getattr(load_settings({}, environ), name) == value


@pytest.mark.parametrize("name", sorted(VALUES))
def test_every_setting_can_come_from_the_file(home, name):
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
    environ |= NEEDED.get(name, {})
    assert getattr(load_settings({}, environ), name) == value


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("prot = 1", "unknown key 'prot' in FILE: did you mean port?"),
        ("max-tokens = 1", "unknown key 'max-tokens' in FILE: did you mean max_tokens?"),
        ("xyz = 1", "unknown key 'xyz' in FILE: `mlxcache serve --help` lists the settings"),
        (
            "[server]\nport = 1",
            "unknown section [server] in FILE: delete that line, and write its keys (port) above "
            "the first section",
        ),
        ("\nram = 8GB  # not 9", 'write ram = "8GB"'),
        ("model = owner/name", 'write model = "owner/name"'),
        ("api_key = secret", 'write api_key = "..."'),
    ],
)
def test_an_error_in_the_file_says_what_to_write(home, text, told):
    path = write(home, text)
    with pytest.raises(ConfigError) as raised:
        load_settings({}, {})
    assert str(raised.value).endswith(told.replace("FILE", str(path)))
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
        ("kv_bits", "8,4"),
        ("kv_bits", "true"),
        ("num_draft_tokens", "0"),
        ("num_draft_tokens", "16"),
    ],
)
def test_an_invalid_value_is_reported_with_its_source(home, name, text):
    flag, variable = "--" + name.replace("_", "-"), "MLXCACHE_" + name.upper()
    with pytest.raises(ConfigError, match=flag):
        load_settings({name: text}, {})
    with pytest.raises(ConfigError, match=variable):
        load_settings({}, {variable: text})
    path = write(home, f"{name} = '{text}'")
    with pytest.raises(ConfigError) as raised:
        load_settings({}, {})
    assert f"{name} in {path}" in str(raised.value)


def test_an_invalid_disk_size_is_reported_with_off_as_an_option():
    """An invalid RAM size is not: RAM cannot be switched off."""
    for text in ("lots", "0", "150%"):
        with pytest.raises(ConfigError, match=r"--disk: .*; or off, for none"):
            load_settings({"disk": text}, {})
        with pytest.raises(ConfigError, match="--ram: ") as raised:
            load_settings({"ram": text}, {})
        assert "off" not in str(raised.value)


def test_values_of_other_toml_types_are_refused(home):
    for line in ("port = true", "port = 1.5", "host = ['a']", "ram = 0.5", "api_key = 5"):
        write(home, line)
        with pytest.raises(ConfigError):
            load_settings({}, {})


def test_an_invalid_api_key_is_not_repeated_in_the_error(home):
    with pytest.raises(ConfigError) as raised:
        load_settings({"api_key": "sécret"}, {})
    assert "cret" not in str(raised.value)


def test_a_named_file_must_exist_and_be_toml(home):
    """Only the default file may be missing."""
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings({}, {}, home / "none.toml")
    with pytest.raises(ConfigError, match="cannot read"):
        load_settings({}, {"MLXCACHE_CONFIG": str(home / "none.toml")})
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_settings({}, {}, write(home, "port = = 1"))


def test_an_empty_variable_is_not_set(home):
    """Shells and service files write unset variables this way."""
    assert load_settings({}, {"MLXCACHE_PORT": ""}).port == 8081


def test_several_files_to_warm_can_be_given_and_must_exist(home):
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


def test_unknown_variables_are_found_with_the_nearest_known_one():
    environ = dict.fromkeys(("MLXCACHE_CONTEX", "MLXCACHE_CONFG", "MLXCACHE_WHATEVER"), "1")
    known = {"MLXCACHE_" + name.upper(): "1" for name in (*VALUES, "config", "more")}
    others = {"MLX_LM_URL": "1", "PATH": "1", "MLXCACHE_PROT": ""}
    assert unknown_variables(environ | known | others, ["MLXCACHE_MORE"]) == [
        ("MLXCACHE_CONFG", "MLXCACHE_CONFIG"),
        ("MLXCACHE_CONTEX", "MLXCACHE_CONTEXT"),
        ("MLXCACHE_WHATEVER", None),
    ]
