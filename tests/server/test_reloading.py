"""Settings of a running service: what changes at once, what waits for a restart, and what changes nothing."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kvstore_client import connect
from kvstore_ops.sidecar import TOKEN, Sidecar

from kvstore.config import DEFAULT_TENANT, LoadedSettings, load
from kvstore.config.reloading import LIVE, ONLY_WHILE_ON, setting_changes
from kvstore.errors import Exhausted, InvalidRequest, KVStoreError
from kvstore.server.descriptors import OWN_COUNT, check_needs, needs
from kvstore.server.reloading import Reloading
from tests.ops.command import run
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec()


class Running:
    """A sidecar with a file of settings."""

    def __init__(self, place: Path, plane: str = "local") -> None:
        self.file = place / "kvstore.toml"
        self.write()
        (place / "red").touch(0o600)
        (place / "red").write_text("red" * 20)
        self.red = f'[tenants.red]\nsecret_file = "{place / "red"}"\ncapacity_bytes = "8 MiB"\n'
        self.write(self.red)
        self.sidecar = Sidecar("--config", str(self.file), "--capacity", "32 MiB", plane=plane)

    def write(self, text: str = "") -> None:
        self.file.write_text(text)

    def reload(self, *options: str) -> tuple[int, dict[str, Any], str]:
        socket = self.sidecar.socket_address.removeprefix("unix://")
        done = run("reload", "--json", "--socket", socket, *options)
        return done.code, json.loads(done.out) if done.code == 0 else {}, done.err


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    found = Running(tmp_path_factory.mktemp("reload"))
    with found.sidecar:
        yield found


def by_name(found: dict[str, Any]) -> dict[str, tuple[Any, Any, bool]]:
    return {each["name"]: (each["before"], each["after"], each["needs_restart"]) for each in found["changes"]}


def test_a_limit_changes_at_once_and_a_dry_run_says_the_same_and_changes_nothing(running: Running) -> None:
    running.write(running.red + '[limits]\nlease_count_max = 0\n[arena]\nregion_bytes = "1 MiB"\n')
    with connect(running.sidecar.socket_address) as client:
        client.store(SPEC, tokens_of(16), random_cache(SPEC, 16)).wait(10)
        code, said, _ = running.reload("--dry-run")
        assert (code, said["dry_run"]) == (0, True)
        assert by_name(said) == {
            "limits.lease_count_max": ("4096", "0", False), "arena.region_bytes": (str(256 << 20), "1048576", True)
        }  # fmt: skip
        assert client.fetch(SPEC, tokens_of(16)).token_count == 16
        assert running.reload()[1]["changes"] == said["changes"]
        with connect(running.sidecar.socket_address) as other, pytest.raises(Exhausted, match="lease_count_max"):
            other.fetch(SPEC, tokens_of(16))  # nothing is known to this one: it needs a lease
        assert by_name(running.reload()[1]).keys() == {"arena.region_bytes"}, "what waits for a restart still differs"
        running.write(running.red)
        running.reload()
        with connect(running.sidecar.socket_address) as other:
            assert other.fetch(SPEC, tokens_of(16)).token_count == 16
    assert running.reload()[1]["changes"] == []


def test_a_file_with_a_mistake_changes_nothing(running: Running) -> None:
    running.write(running.red + "[limits]\nlease_count_max = 0\nticket_count_max = -1\n")
    code, _, said = running.reload()
    assert code == 2
    assert "limits.ticket_count_max" in said
    running.write(running.red)
    assert running.reload()[1]["changes"] == []


def test_only_the_default_tenants_operators_change_what_is_all_tenants(running: Running) -> None:
    code, _, said = running.reload("--tenant", "red")
    assert code not in (0, 2)
    assert "without --tenant" in said
    done = run("reload", "--address", "127.0.0.1:1")
    assert done.code == 2
    assert "on the sidecar's own host" in done.err


def test_the_log_level_changes_at_once(running: Running) -> None:
    log = running.sidecar.directory / "log"

    def opened_count() -> int:
        with connect(running.sidecar.socket_address) as client:
            client.stats()
        return log.read_text().count("session opened")

    assert opened_count() == 0
    running.write(running.red + '[server]\nlog_level = "debug"\n')
    running.reload()
    told = opened_count()
    assert told > 0
    running.write(running.red)
    running.reload()
    before = log.read_text().count("session opened")  # the reload's own session
    assert opened_count() == before
    assert '"settings were reloaded"' in log.read_text()


def test_the_remote_planes_process_logs_at_the_new_level_too(tmp_path: Path) -> None:
    """Also when it was started again since."""
    running = Running(tmp_path, "remote")
    running.write('[server]\nlog_level = "warning"\n')

    def line_count() -> int:
        """Lines of that process about sessions, after another session."""
        with suppress(KVStoreError):  # it starts again
            connect(running.sidecar.address, token=TOKEN).close()
        lines = (running.sidecar.directory / "log").read_text().splitlines()
        return sum("session opened" in line and "kvstore.remote" in line for line in lines)

    with running.sidecar:
        assert line_count() == 0
        running.write('[server]\nlog_level = "info"\n')
        running.reload()
        eventually(lambda: line_count() > 0)
        children = Path(f"/proc/{running.sidecar.pid}/task/{running.sidecar.pid}/children").read_text().split()
        names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
        os.kill(next(int(pid) for pid, name in names.items() if b"kvstore.remote" in name), signal.SIGKILL)
        before = line_count()
        eventually(lambda: line_count() > before)


# ---------------------------------------------------------------- what differs


def loaded(tmp_path: Path, text: str) -> LoadedSettings:
    file = tmp_path / "kvstore.toml"
    file.write_text(text)
    return load(file, {"XDG_STATE_HOME": "/nonexistent"})  # nothing is made there; paths of sockets are short


def test_every_live_setting_is_one() -> None:
    tree = load().settings
    for name in LIVE:
        section, _, field = name.partition(".")
        assert field in {each.name for each in fields(getattr(tree, section))}
    assert ONLY_WHILE_ON <= LIVE


def test_what_follows_from_a_setting_that_needs_a_restart_waits_for_it(tmp_path: Path) -> None:
    before = loaded(tmp_path, '[arena]\ncapacity_bytes = "64 MiB"\n')
    after = loaded(tmp_path, '[arena]\ncapacity_bytes = "128 MiB"\n[limits]\nticket_bytes_max = "1 MiB"\n')
    found = {each.name: each.is_live for each in setting_changes(before, after)}
    assert found["limits.ticket_bytes_max"]
    assert not found["arena.capacity_bytes"]
    assert found.keys() == {"limits.ticket_bytes_max", "arena.capacity_bytes"}


@pytest.mark.parametrize(
    ("was", "now", "is_live"), [("1 MiB", "2 MiB", True), ("1 MiB", "0", False), ("0", "1", False)]
)
def test_what_0_turns_off_is_turned_on_and_off_by_a_restart(
    tmp_path: Path, was: str, now: str, *, is_live: bool
) -> None:
    before, after = (loaded(tmp_path, f'[policy]\nscrub_bytes_per_s = "{each}"\n') for each in (was, now))
    (change,) = setting_changes(before, after)
    assert change.is_live is is_live


def test_tenants_that_come_or_go_are_said(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    before, after = loaded(tmp_path, ""), loaded(tmp_path, f'[tenants.red]\nsecret_file = "{secret}"\n')
    found = {each.name: each for each in setting_changes(before, after)}
    assert found["tenants.red.secret_file"].before is None
    assert not any(each.is_live for each in found.values())
    assert {each.after for each in setting_changes(after, before)} == {None}


def test_passwords_are_not_shown(tmp_path: Path) -> None:
    one, other = (
        loaded(tmp_path, f'[tiers.redis]\nurl = "redis://:{word}@127.0.0.1:6379"\n') for word in ("secret", "other")
    )
    (change,) = setting_changes(one, other)
    said = [change.before, change.after]
    assert not any("secret" in (text or "") or "other" in (text or "") for text in said)


async def test_the_room_of_a_setting_that_waits_for_a_restart_is_not_given_away(tmp_path: Path) -> None:
    """Sessions take the open files that connections would leave: until a restart these still take theirs."""
    first = loaded(tmp_path, "[limits]\nconnection_count_max = 1000\n")
    own = first.of_tenant(DEFAULT_TENANT)
    limit = OWN_COUNT + sum(need.files for need in needs(own))
    reloading = Reloading(first, partial(check_needs, limit=limit, of_tiers=lambda _: []))
    reloading.follow(DEFAULT_TENANT, own)
    (tmp_path / "kvstore.toml").write_text("[limits]\nconnection_count_max = 100\nsession_count_max = 900\n")
    for dry_run in (True, False):
        with pytest.raises(InvalidRequest, match=r"limits\.connection_count_max"):
            await reloading.reload(dry_run=dry_run)
    assert own.limits.session_count_max == 64
    (tmp_path / "kvstore.toml").write_text("[limits]\nconnection_count_max = 100\nsession_count_max = 63\n")
    await reloading.reload(dry_run=False)
    assert (own.limits.session_count_max, own.limits.connection_count_max) == (63, 1000)


async def test_every_tenant_has_its_own_leaves_changed(tmp_path: Path) -> None:
    red = f'[tenants.red]\nsecret_file = "{tmp_path / "red"}"\ncapacity_bytes = "8 MiB"\n'
    first = loaded(tmp_path, red)
    reloading = Reloading(first, lambda _: None)
    trees = {name: first.of_tenant(name) for name in first.settings.tenant_names}
    for name, tree in trees.items():
        reloading.follow(name, tree)
    assert trees["red"].limits is not trees["default"].limits
    (tmp_path / "kvstore.toml").write_text(red + "[limits]\nstream_count_max = 3\n[policy]\ndemotion_wait_s = 7\n")
    await reloading.reload(dry_run=True)
    assert {tree.limits.stream_count_max for tree in trees.values()} == {64}
    await reloading.reload(dry_run=False)
    assert {(tree.limits.stream_count_max, tree.policy.demotion_wait_s) for tree in trees.values()} == {(3, 7.0)}
    assert trees["red"].limits.leased_bytes_max == 8 << 20, "what follows from its own memory stays"
    (tmp_path / "kvstore.toml").write_text("nonsense")
    with pytest.raises(InvalidRequest, match="not valid TOML"):
        await reloading.reload(dry_run=False)


def test_the_environment_is_the_one_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"KVSTORE__LIMITS__STREAM_COUNT_MAX": "9", "XDG_STATE_HOME": str(tmp_path)}
    first = load(None, environment, {"limits.ticket_count_max": 5})
    environment.clear()
    monkeypatch.setitem(os.environ, "KVSTORE__LIMITS__STREAM_COUNT_MAX", "11")
    assert setting_changes(first, first.again()) == []
