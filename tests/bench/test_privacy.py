"""Texts of a report tell nothing of whose machine it is."""

from __future__ import annotations

import getpass
import re
import socket
import tempfile
from pathlib import Path

import pytest

from mlxcache.bench.machine import describe_machine, device_info, private_strings, scrub


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("in /Users/ann/models/x: bad", "in ...: bad"),
        ("no /Users/Jane Q Public/Acme Client", "no ..."),
        ("/Volumes/Acme Client/models/secret-7b/x", "..."),
        ("'/Volumes/Acme Client/x' and '/Users/bo b/y' differ", "'...' and '...' differ"),
        ('"/Users/Jane Q Public/acme/config.json" is bad', '".../config.json" is bad'),
        ("PATH=/Users/ann/bin:/opt/acme", "PATH=..."),
        ("file:///Users/jane/x/y", "..."),
        ("via https://proxy.acme.corp:8080/x now", "via ... now"),
        ("https://jane:pw@github.com/x", "..."),
        ("see https://huggingface.co/docs/hub?token=1", "see https://huggingface.co/docs/hub"),
        ("Pool(host='proxy.acme.corp', port=1)", "Pool(host='...', port=1)"),
        ("http://127.0.0.1:80/v1/chat, /v1/models, /health", None),
        ("C:\\Users\\ann\\model", "..."),
        ("\\\\server\\acme\\model", "..."),
        ("~/secret/model: bad", "...: bad"),
        ("ann's host.local, Annex", "...'s ..., Annex"),
        ("50 tokens/s and 1/2, mlx_lm.server, a / b", None),
    ],
)  # fmt: skip
def test_folders_hosts_and_names_are_cut(text: str, scrubbed: str | None) -> None:
    """Whole words only, in any case; what looks like a path and is none stays."""
    assert scrub(text, ["host.local", "ann"]) == (scrubbed or text)


def test_a_model_is_cut_by_every_name_it_has(tmp_path: Path) -> None:
    """As given and resolved, with its parents, where blanks of them were wrapped, too."""
    given = tmp_path / "link to it"
    real = tmp_path / "Acme Client" / "broken-model"
    real.mkdir(parents=True)
    given.symlink_to(real)
    text = (
        f"No weights in {real}\nbroken-model of Acme\nClient; {given} fails; "
        f"OSError: {real}/config.json: bad; '{real.parent}/other one/x'"
    )
    shown = scrub(text, private_strings(given))
    assert shown.endswith("OSError: .../config.json: bad; '...'")
    for private in ("Acme", "Client", "broken", "link", "other", str(tmp_path)):
        assert private not in shown
    relative = scrub("my models/acme 7b is bad", private_strings("my models/acme 7b"))
    assert relative == "... is bad"


def test_the_names_are_this_users_and_this_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "anns-mac.local")
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.acme.corp:8080")
    assert {"anns-mac.local", "anns-mac", "root", "proxy.acme.corp"} <= set(private_strings())
    assert scrub("root at Anns-Mac: /root/x y") == "... at ...: ..."
    assert scrub("the model of mlxcache", private_strings("model", ".")) == "the model of mlxcache"


def test_code_is_shown_by_its_package() -> None:
    import mlx_lm

    files = f'File "{mlx_lm.__file__}", line 3; File "{Path(__file__)}", line 1'
    assert scrub(files) == 'File ".../mlx_lm/__init__.py", line 3; File "...", line 1'


def test_what_is_unique_to_a_device_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX's CUDA device has such fields."""
    import mlx.core as mx

    info = {"device_name": "GPU of /home/ann/x", "uuid": "GPU-1234", "pci_bus_id": "0000:01"}
    monkeypatch.setattr(mx, "device_info", lambda: info)
    assert device_info() == {"device_name": "GPU of ..."}


def test_the_machine_is_described_without_its_names() -> None:
    found = describe_machine()
    assert found["memory_bytes"] > 1e9
    assert {"mlx", "mlx-lm"} <= found["versions"].keys()
    assert found["device_info"]
    text = str(found)
    for private in private_strings(tempfile.gettempdir()):
        assert not re.search(rf"(?<!\w){re.escape(private)}(?!\w)", text)
