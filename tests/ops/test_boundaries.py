"""docs/upgrade.md and docs/security.md: what they say of versions, settings and modes, and an upgrade as it stands."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import stat
from pathlib import Path

import pytest
from kvstore_client import connect
from kvstore_ops.pages.configuration import entries, sections
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Unavailable
from kvstore.spec import Durability
from tests.conftest import ROOT
from tests.ops.command import Done, run
from tests.specs import random_cache, small_spec, tokens_of

UPGRADE, SECURITY = ((ROOT / "docs" / name).read_text() for name in ("upgrade.md", "security.md"))
SETTINGS = {entry.name for section in sections() for entry in entries(*section)}
SECTIONS = "server|arena|tiers|limits|policy|controller|events|remote"


@pytest.mark.parametrize("page", ["upgrade.md", "security.md", "operations.md"])
def test_settings_that_are_named_are_there(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    named = set(re.findall(rf"`((?:{SECTIONS})\.[a-z_0-9.]*[a-z_0-9])", text))
    assert named
    assert named <= SETTINGS


def test_the_versions_of_the_table_are_the_codes() -> None:
    rows = re.findall(r"^\| [^|]+ \| [^|]+ \| v?(\d+) \| `([\w/]+)\.py:(\w+)` \|", UPGRADE, re.MULTILINE)
    assert len(rows) == 11
    for version, path, name in rows:
        value = getattr(importlib.import_module(path.replace("/", ".")), name)
        assert str(value).removeprefix("v") == version, path


def commands(text: str) -> list[list[str]]:
    """Of each example, its commands."""
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [[line.partition("  #")[0] for line in block.splitlines()] for block in blocks]


def said(lines: list[str], socket: str) -> list[Done]:
    """What each command said, all of which ended well. The doctor may find this machine unwell."""
    found = []
    for line in lines:
        program, *arguments = shlex.split(line.replace("$KVSTORE_SOCKET", socket))
        assert program == "kvstore"
        found.append(run(*arguments))
        assert found[-1].code == 0 or (arguments[0] == "doctor" and found[-1].code == 11), found[-1]
    return found


def test_an_upgrade_and_a_roll_back_keep_what_there_was(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_spec(model_id="kept")
    tokens, cache = tokens_of(64), random_cache(small_spec(), 64)
    with Sidecar("--capacity", "16 MiB", "--metrics-port", "0", nvme="32 MiB") as sidecar:
        socket = sidecar.address.removeprefix("unix://")
        monkeypatch.setenv("KVSTORE_SOCKET", socket)
        with connect(sidecar.address) as client:
            assert client.store(spec, tokens, cache).wait(20) is Durability.LOCAL
        before, after = commands(UPGRADE)
        assert "kept" in said(before, socket)[1].out
        sidecar.stop()
        (place,) = sidecar.directory.rglob("format")
        whole = place.read_bytes()
        place.write_text(json.dumps({**json.loads(whole), "format": 2, "minimum_reader": 2}))
        files = {path: path.read_bytes() for path in place.parent.iterdir()}
        with pytest.raises(Unavailable, match="newer kvstore"):  # what a newer release wrote
            sidecar.start()
        assert {path: path.read_bytes() for path in place.parent.iterdir()} == files
        place.write_bytes(whole)
        sidecar.start()
        shown = said(after, socket)
        assert "kept" in shown[1].out
        assert re.search(r"\b4\b", shown[1].out)
        assert "nvme: read" in shown[3].out
        with connect(sidecar.address) as client:
            assert client.fetch(spec, tokens, verify=True).token_count == 64
        sidecar.stop()
        (sidecar.directory / "models" / "default.json").unlink()  # as after a release that kept no models
        sidecar.start()
        unread = run("verify", "--tier", "nvme", "--json")
        assert (unread.code, unread.json["outcomes"].keys()) == (10, {"model not registered"})


def test_doors_have_the_modes_that_are_said(sidecar: Sidecar) -> None:
    def mode(path: Path) -> str:
        return f"{stat.S_IMODE(path.stat().st_mode):04o}"

    run_directory = Path(sidecar.socket_address.removeprefix("unix://")).parent
    assert f"mode {mode(run_directory / 'kvstore.sock')} in a directory of mode {mode(run_directory)}" in SECURITY
    assert mode(run_directory / "data.sock") == mode(run_directory / "kvstore.sock")
    state = next(path.parent for path in sidecar.directory.rglob("lock") if path.parent.name != "nvme")
    assert f"| mode {mode(state)}, files {mode(state / 'lock')} |" in SECURITY
    environment = Path(f"/proc/{sidecar.pid}/environ")
    assert environment.stat().st_uid == 0  # the process cannot be dumped
    if os.geteuid():
        with pytest.raises(PermissionError):
            environment.read_bytes()
