"""Open files: what the settings need is counted at the start; running out of them later refuses, and ends nothing."""

from __future__ import annotations

import json
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from kvstore_client import Client, connect
from kvstore_ops.sidecar import Sidecar

from kvstore.config import load
from kvstore.errors import InvalidRequest
from kvstore.server.descriptors import Need, check_listener, check_needs
from kvstore.server.tiers import TIERS, Builder, Tiers
from kvstore.spec import Durability
from kvstore.tiers import LocalTier
from tests.server.confined import confined, log_of
from tests.server.raw import Handoff, Raw, eventually
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec()
FEW = {
    "KVSTORE__LIMITS__SESSION_COUNT_MAX": "40", "KVSTORE__LIMITS__STAGING_COUNT_TOTAL_MAX": "16",
    "KVSTORE__LIMITS__CONNECTION_COUNT_MAX": "16",
}  # fmt: skip


def limit_of(own: Sidecar) -> int:
    return resource.prlimit(own.pid, resource.RLIMIT_NOFILE)[0]


@contextmanager
def no_more_files(own: Sidecar) -> Iterator[None]:
    """The server has what it has."""
    soft, hard = resource.prlimit(own.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(own.pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{own.pid}/fd")), hard))
    try:
        yield
    finally:
        resource.prlimit(own.pid, resource.RLIMIT_NOFILE, (soft, hard))


def store(client: Client, count: int, seed: int) -> tuple[Durability, str]:
    """How durable a store of ``count`` tokens became, and why no more."""
    receipt = client.store(SPEC, tokens_of(count, seed), random_cache(SPEC, count, seed))
    return receipt.wait(20), receipt.reason


def test_the_soft_limit_is_raised_and_more_regions_than_it_had_are_served() -> None:
    with confined(200, 2048, "--capacity", "300 MiB", KVSTORE__ARENA__REGION_BYTES="1 MiB", **FEW) as (own, line):
        assert "ready" in line
        assert limit_of(own) == 2048
        with connect(own.socket_address) as client:
            eventually(lambda: client.stats().arena.prefaulted_bytes == 300 << 20, 60.0)
            assert store(client, 160, 1)[0] is Durability.MEMORY
        assert "Traceback" not in log_of(own)


NEEDS = {
    "arena.region_bytes": {"arena.capacity_bytes": "600 MiB", "arena.region_bytes": "1 MiB"},
    "tiers.nvme.region_bytes": {"tiers.nvme.capacity_bytes": "600 MiB", "tiers.nvme.region_bytes": "1 MiB"},
    "limits.staging_count_total_max": {"limits.staging_count_total_max": 600},
    "limits.connection_count_max": {"limits.connection_count_max": 600},
    "limits.session_count_max": {"limits.session_count_max": 600},
}


def test_the_connections_of_other_hosts_fit_the_limit_of_the_process_that_has_them(tmp_path: Path) -> None:
    """Else whoever reaches the port, without a token, takes the files that clients' stores need there."""
    base: dict[str, object] = {
        "server.state_directory": tmp_path, "arena.capacity_bytes": "8 MiB", "tiers.nvme.capacity_bytes": "1 MiB",
        "limits.staging_count_total_max": 16, "limits.connection_count_max": 16, "limits.session_count_max": 16,
    }  # fmt: skip
    listening: dict[str, object] = {**base, "remote.address": "127.0.0.1:0", "remote.token_file": "tokens"}
    for flags in (base, {**listening, "remote.connection_count_max": 200}):
        check_needs({"default": load(None, {}, flags).settings}, 400, TIERS.needs)
    with pytest.raises(InvalidRequest, match=r"remote\.connection_count_max = 512") as refused:
        check_needs({"default": load(None, {}, listening).settings}, 400, TIERS.needs)
    assert refused.value.fields["setting"] == "remote.connection_count_max"
    few = load(None, {}, {**listening, "remote.connection_count_max": 200}).settings
    with pytest.raises(InvalidRequest, match=r"remote\.connection_count_max = 200"):
        check_listener(dict.fromkeys(("default", *"abcd"), few), 400)


@pytest.mark.parametrize("name", NEEDS)
def test_the_setting_that_asks_for_the_most_is_named(tmp_path: Path, name: str) -> None:
    base: dict[str, object] = {
        "server.state_directory": tmp_path, "arena.capacity_bytes": "8 MiB", "tiers.nvme.capacity_bytes": "1 MiB",
        "limits.staging_count_total_max": 16, "limits.connection_count_max": 16, "limits.session_count_max": 16,
    }  # fmt: skip
    check_needs({"default": load(None, {}, base).settings}, 400, TIERS.needs)
    with pytest.raises(InvalidRequest, match=name) as caught:
        check_needs({"default": load(None, {}, {**base, **NEEDS[name]}).settings}, 400, TIERS.needs)
    assert "400" in caught.value.message


def test_what_all_tenants_need_is_counted(tmp_path: Path) -> None:
    settings = load(None, {}, {"server.state_directory": tmp_path, "arena.capacity_bytes": "8 MiB"}).settings
    check_needs({"default": settings}, 1024, TIERS.needs)
    with pytest.raises(InvalidRequest):
        check_needs({"default": settings, "a": settings, "b": settings}, 1024, TIERS.needs)


def test_files_of_a_device_that_was_larger_are_counted(tmp_path: Path) -> None:
    """They are opened, and read, before the first of them goes."""
    device = tmp_path / "nvme"
    changes: dict[str, object] = {
        "server.state_directory": tmp_path, "arena.capacity_bytes": "8 MiB", "tiers.nvme.capacity_bytes": "1 MiB",
        "tiers.nvme.directory": device,
    }  # fmt: skip
    settings = load(None, {}, changes).settings
    check_needs({"default": settings}, 1200, TIERS.needs)
    device.mkdir()
    for number in range(600):
        (device / f"region-{number:06}.kvs").touch()
    with pytest.raises(InvalidRequest, match=r"tiers\.nvme\.region_bytes"):
        check_needs({"default": settings}, 1200, TIERS.needs)


def test_what_any_tier_needs_is_counted(tmp_path: Path) -> None:
    settings = load(None, {}, {"server.state_directory": tmp_path, "arena.capacity_bytes": "8 MiB"}).settings
    need = Need(1000, "tiers.other.connection_count", 1000, "one each: lower it")
    other: Builder[LocalTier] = Builder("other", "tiers.other.address", lambda *_: None, lambda _: [need])
    with pytest.raises(InvalidRequest, match=r"tiers\.other\.connection_count = 1000"):
        check_needs({"default": settings}, 1024, Tiers(local=(*TIERS.local, other)).needs)


def test_a_setting_that_does_not_fit_stops_the_start() -> None:
    settings = {**FEW, "KVSTORE__ARENA__REGION_BYTES": "1 MiB"}
    with confined(512, 512, "--capacity", "600 MiB", **settings) as (own, line):
        assert line == ""
        assert own.process is not None
        assert own.process.wait(20) != 0
        assert "arena.region_bytes" in log_of(own)
        assert "Traceback" not in log_of(own)


def test_an_arena_that_can_have_no_region_more_makes_do_with_what_it_has() -> None:
    settings = {"KVSTORE__ARENA__REGION_BYTES": "1 MiB", "KVSTORE__ARENA__PREFAULT": "false", **FEW}
    with confined(2048, 2048, "--capacity", "16 MiB", **settings) as (own, line), connect(own.socket_address) as client:
        assert "ready" in line
        assert store(client, 1600, 0)[0] is Durability.MEMORY
        regions = client.stats().arena.region_count
        with no_more_files(own):
            for seed in range(1, 5):
                assert store(client, 3200, seed)[0] is Durability.MEMORY, "older chunks make room"
            assert client.stats().arena.region_count == regions
        assert store(client, 4800, 20)[0] is Durability.MEMORY
        assert client.stats().arena.region_count > regions


def test_prefaulting_without_open_files_ends_and_the_service_goes_on() -> None:
    """The files run out while the arena is still being made."""
    settings = {"KVSTORE__ARENA__REGION_BYTES": "1 MiB", **FEW}
    with confined(2048, 2048, "--capacity", "1000 MiB", **settings) as (own, line):
        assert "ready" in line
        with no_more_files(own):
            eventually(lambda: "cannot share" in log_of(own) or "grows no more" in log_of(own), 30.0)
        with connect(own.socket_address) as client:
            assert store(client, 160, 1)[0] is Durability.MEMORY


def test_a_device_that_can_have_no_file_more_keeps_what_it_has() -> None:
    settings = {"KVSTORE__TIERS__NVME__REGION_BYTES": "1 MiB", **FEW}
    with confined(2048, 2048, "--capacity", "32 MiB", nvme="64 MiB", **settings) as (own, line):
        assert "ready" in line
        with connect(own.socket_address) as client:
            assert store(client, 16, 0)[0] is Durability.LOCAL
            eventually(lambda: client.stats().arena.prefaulted_bytes == 32 << 20, 60.0)
            store(client, 3200, 7)  # has its staging by now
            with no_more_files(own):
                level, reason = Durability.LOCAL, ""
                for seed in range(1, 40):
                    level, reason = store(client, 3200, 100 + seed)
                    if level is not Durability.LOCAL:
                        break
                assert level in (Durability.MEMORY, Durability.NONE)
                assert reason
                assert len(client.fetch(SPEC, tokens_of(16, 0))[0][0][0]) == 16
        with connect(own.socket_address) as again:
            assert again.fetch(SPEC, tokens_of(16, 0)).token_count == 16


def test_a_server_without_open_files_says_so_once_and_accepts_again(own_sidecar: Sidecar) -> None:
    with no_more_files(own_sidecar), suppress(OSError), Handoff(own_sidecar.directory) as door:
        door.socket.settimeout(1.0)  # time for some tries of the server's
        door.exchange(op="hello", version=1)
    with connect(own_sidecar.socket_address) as client:
        assert store(client, 16, 1)[0] is Durability.MEMORY
    assert log_of(own_sidecar).count("cannot accept") == 1


# ---------------------------------------------------------------- descriptors on their way


def deaf(directory: Path, questions: int) -> socket.socket:
    """A session that asks for all regions, again and again, and reads no answer."""
    asking = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asking.settimeout(5.0)
    asking.connect(str(directory / "run" / "data.sock"))
    asking.send(b'{"op": "hello", "version": 1}')
    asking.setblocking(False)
    with suppress(OSError):
        for _ in range(questions):
            asking.send(b'{"op": "regions", "have": 0}')
    return asking


def test_answers_that_nobody_reads_cost_nobody_else_a_session_or_memory() -> None:
    """The kernel passes only so many descriptors between a user's processes: more than these 36 deaf sessions would
    have in flight together. New sessions, new staging and new files for the byte movers need some of them, too."""
    settings = {
        "KVSTORE__ARENA__REGION_BYTES": "1 MiB", "KVSTORE__TIERS__NVME__REGION_BYTES": "1 MiB", **FEW,
    }  # fmt: skip
    with confined(512, 512, "--capacity", "48 MiB", nvme="32 MiB", **settings) as (own, line):
        assert "ready" in line
        with connect(own.socket_address) as before:
            assert store(before, 16, 0)[0] is Durability.LOCAL
            eventually(lambda: before.stats().arena.prefaulted_bytes == 48 << 20, 60.0)
            held = [deaf(own.directory, 60) for _ in range(36)]
            try:
                with connect(own.socket_address) as another:
                    assert store(another, 1600, 1)[0] in (Durability.LOCAL, Durability.MEMORY)
                    assert another.fetch(SPEC, tokens_of(1600, 1)).token_count == 1600
                assert store(before, 6400, 2)[0] in (Durability.LOCAL, Durability.MEMORY)
                assert own.process is not None
                assert own.process.poll() is None
            finally:
                for each in held:
                    each.close()
        with Raw(own) as raw:
            eventually(lambda: raw.stats().sessions.session_count == 1, 20.0)


def test_a_peer_that_went_with_answers_unread_is_counted_until_they_are_gone(own_sidecar: Sidecar) -> None:
    """Closing the server's end takes nothing back of what lies in the kernel for the peer."""
    with Raw(own_sidecar) as witness:
        before = witness.stats().descriptor_count
        held = [deaf(own_sidecar.directory, 60) for _ in range(5)]
        eventually(lambda: witness.stats().sessions.session_count == 1)
        assert witness.stats().descriptor_count >= before + 5
        for each in held:
            each.close()
        eventually(lambda: witness.stats().descriptor_count <= before)


def test_two_questions_at_once_are_answered(own_sidecar: Sidecar) -> None:
    """As clients ask: for the presence table, and before its answer is read for staging."""
    with Handoff(own_sidecar.directory) as door:
        door.exchange(op="hello", version=1)
        for question in ({"op": "presence"}, {"op": "staging", "bytes": 4096}, {"op": "regions", "have": 0}):
            door.send(json.dumps(question).encode())
        seen: list[Any] = [door.receive()[0]["op"] for _ in range(3)]
        assert seen == ["presence", "staging", "regions"]
