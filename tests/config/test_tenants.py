"""Tenants in the settings: whose a value is, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvstore.config import LoadedSettings, TenantSettings, load
from kvstore.config.machine import memory_limit_bytes
from kvstore.config.tenants import check_tenants
from kvstore.errors import InvalidRequest

MIB = 1 << 20
ENVIRONMENT = {
    "HOME": "/h",
    "KVSTORE__ARENA__CAPACITY_BYTES": "64 MiB",
    "KVSTORE__TIERS__NVME__CAPACITY_BYTES": "1 GiB",
}


def loaded(tmp_path: Path, text: str, environment: Mapping[str, str] = ENVIRONMENT) -> LoadedSettings:
    file = tmp_path / "kvstore.toml"
    file.write_text(text)
    return load(file, environment)


def test_without_tenants_the_tree_is_as_it_was() -> None:
    found = load(None, ENVIRONMENT)
    assert found.settings.tenant_names == ["default"]
    assert found.of_tenant("default") is found.settings
    assert not [name for name in found.origins if name.startswith("tenants")]


def test_a_tenant_sees_its_own_arena_device_and_sockets_and_everybodys_rest(tmp_path: Path) -> None:
    found = loaded(
        tmp_path,
        '[tenants.a]\nsecret_file = "s"\ntoken_file = "t"\ncapacity_bytes = "32 MiB"\n'
        '[limits]\npin_bytes_max = "1 MiB"\nsession_count_max = 3\n[remote]\ntoken_file = "own"\n',
    )
    assert found.settings.tenant_names == ["default", "a"]
    own, default = found.of_tenant("a"), found.of_tenant("default")
    assert (own.arena.capacity_bytes, default.arena.capacity_bytes) == (32 * MIB, 64 * MIB)
    assert own.tiers.nvme.directory == default.tiers.nvme.directory / "tenants" / "a"
    assert own.tiers.nvme.capacity_bytes == 1 << 30
    assert own.server.socket_directory == default.server.socket_directory / "a"
    assert (own.remote.token_file, default.remote.token_file) == ("t", "own")
    assert (own.limits.leased_bytes_max, own.limits.ticket_bytes_max) == (32 * MIB, 16 * MIB)
    assert (own.limits.pin_bytes_max, own.limits.session_count_max) == (MIB, 3)
    assert default is not own
    assert own.policy is default.policy


def test_the_remote_planes_tokens_are_not_another_tenants(tmp_path: Path) -> None:
    found = loaded(tmp_path, '[tenants.a]\nsecret_file = "s"\n[remote]\ntoken_file = "own"\n')
    assert found.of_tenant("a").remote.token_file == ""


def test_the_default_tenant_may_have_a_section_too(tmp_path: Path) -> None:
    found = loaded(tmp_path, '[tenants.default]\nuid = 5\nnvme_capacity_bytes = 0\n[remote]\ntoken_file = "own"\n')
    assert found.settings.tenant_names == ["default"]
    own = found.of_tenant("default")
    assert own.server == found.settings.server
    assert own.tiers.nvme.directory == found.settings.tiers.nvme.directory
    assert (own.tiers.nvme.capacity_bytes, own.remote.token_file) == (0, "own")


def test_every_value_says_where_it_came_from(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "KVSTORE__TENANTS__TEAM_B__SECRET_FILE": "x", "KVSTORE__TENANTS__TEAM_B__UID": "1001"}
    rows = {name: row for name, *row in loaded(tmp_path, '[tenants.a]\nsecret_file = "s"\n', environment).rows()}
    assert rows["tenants.a.secret_file"] == ["s", str(tmp_path / "kvstore.toml")]
    assert rows["tenants.a.capacity_bytes"] == [64 * MIB, "default"]
    assert rows["tenants.a.uid"] == [None, "default"]
    assert rows["tenants.team_b.uid"] == [1001, "KVSTORE__TENANTS__TEAM_B__UID"]


TOO_MUCH = f"capacity_bytes = {memory_limit_bytes()}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tenants.a]\n", ["tenants.a.secret_file", "not set", "0600"]),
        ('[tenants.a]\nsecret = "x"\n', ["tenants.a.secret", "did you mean 'secret_file'"]),
        ("[tenants]\na = 1\n", ["[tenants.a]"]),
        ('[tenants.A]\nsecret_file = "x"\n', ["[tenants.A]", "lower-case"]),
        ('[tenants.".."]\nsecret_file = "x"\n', ["lower-case"]),
        ('[tenants."a/b"]\nsecret_file = "x"\n', ["lower-case"]),
        ('[tenants.""]\nsecret_file = "x"\n', ["lower-case"]),
        (f'[tenants.{"a" * 33}]\nsecret_file = "x"\n', ["at most 32"]),
        ('[tenants.a]\nsecret_file = "x"\ncapacity_bytes = 8191\n', ["tenants.a.capacity_bytes", "8 KiB"]),
        (
            '[tenants.a]\nsecret_file = "x"\ncapacity_bytes = "1 MiB"\nhbm_capacity_bytes = "2 MiB"\n',
            ["tenants.a.hbm_capacity_bytes = 2097152", "at most tenants.a.capacity_bytes, 1048576"],
        ),
        ('[tenants.a]\nsecret_file = "x"\nuid = -1\n', ["tenants.a.uid", "number"]),
        ('[tenants.a]\nsecret_file = "x"\nuid = 4294967295\n', ["tenants.a.uid", "number"]),
        ('[tenants.a]\nsecret_file = "x"\nuid = "root"\n', ["tenants.a.uid", "whole number"]),
        (
            '[tenants.a]\nsecret_file = "x"\nuid = 5\n[tenants.b]\nsecret_file = "y"\nuid = 5\n',
            ["tenants.b.uid = 5", "tenants.a.uid", "give each its own"],
        ),
        ('[tenants.a]\nsecret_file = "x"\n' + TOO_MUCH, ["tenants.a.capacity_bytes", "this machine has", "lower it"]),
        (
            f'[tenants.a]\nsecret_file = "x"\n[server]\nsocket_directory = "/{"x" * 84}"\n',
            ["tenants.a", "99", "socket_directory"],
        ),
    ],
)
def test_a_mistake_is_named_with_its_remedy(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        loaded(tmp_path, text)
    for word in words:
        assert word in caught.value.message


def test_arenas_that_fill_the_memory_to_the_byte_are_fine() -> None:
    tenant = TenantSettings(secret_file="x", capacity_bytes=60 * MIB, nvme_capacity_bytes=0)
    check_tenants({"a": tenant}, Path("/run"), Path("/nvme"), 40 * MIB, 100 * MIB)
    with pytest.raises(InvalidRequest, match=r"tenants\.a\.capacity_bytes"):
        check_tenants({"a": tenant}, Path("/run"), Path("/nvme"), 40 * MIB, 100 * MIB - 1)


def test_a_tenant_whose_sockets_would_lie_in_the_devices_directory_is_refused() -> None:
    tenant = TenantSettings(secret_file="s", capacity_bytes=60 * MIB, nvme_capacity_bytes=0)
    with pytest.raises(InvalidRequest, match=r"tenants\.nvme = nvme: its sockets would lie in tiers\.nvme\.directory"):
        check_tenants({"nvme": tenant}, Path("/state"), Path("/state/nvme"), 40 * MIB, 200 * MIB)
