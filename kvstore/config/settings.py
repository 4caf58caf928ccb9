"""The settings tree. The type of a field says how it is read: Size and Duration accept units."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from kvstore.config.tenants import DEFAULT_TENANT, TenantSettings
from kvstore.errors import InvalidRequest
from kvstore.policy import POLICIES
from kvstore.units import is_loopback, split_address

MIB = 1 << 20
GIB = 1 << 30
PAGE_BYTES = 4096

Size = Annotated[int, "size"]
Duration = Annotated[float, "duration"]


def _require(condition: bool, setting: str, value: object, remedy: str) -> None:
    if not condition:
        raise InvalidRequest(f"{setting} = {value}: {remedy}", setting=setting)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Where the service lives and how it speaks to its operator."""

    state_directory: Path
    socket_directory: Path
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 9464
    log_level: str = "info"
    log_format: str = "json"
    shutdown_grace_s: Duration = 10.0

    def __post_init__(self) -> None:
        _require(0 <= self.metrics_port <= 65535, "server.metrics_port", self.metrics_port, "use 0..65535")
        levels = ("debug", "info", "warning", "error")
        _require(self.log_level in levels, "server.log_level", self.log_level, f"use one of {levels}")
        _require(self.log_format in ("json", "text"), "server.log_format", self.log_format, "use json or text")
        _require(self.shutdown_grace_s >= 0, "server.shutdown_grace_s", self.shutdown_grace_s, "use >= 0")
        socket = str(self.socket_directory / "kvstore.sock")
        _require(len(socket) < 100, "server.socket_directory", socket, "a socket path has at most 99 characters")


@dataclass(frozen=True, kw_only=True)
class ArenaSettings:
    """The node-local memory tier. Capacity is a hard cap, headers included."""

    capacity_bytes: Size
    region_bytes: Size = 256 * MIB
    prefault: bool = True

    def __post_init__(self) -> None:
        region, capacity = self.region_bytes, self.capacity_bytes
        fits = region % PAGE_BYTES == 0 and region >= PAGE_BYTES
        _require(fits, "arena.region_bytes", region, f"use a multiple of {PAGE_BYTES}")
        _require(capacity >= PAGE_BYTES * 2, "arena.capacity_bytes", capacity, "use at least 8 KiB")


@dataclass(frozen=True, kw_only=True)
class NvmeSettings:
    """The device tier. ``capacity_bytes`` is a hard cap on all region files; 0 leaves the tier off. ``write``:
    "back" acknowledges from memory and writes at once, "through" acknowledges when the device has it."""

    directory: Path
    capacity_bytes: Size
    region_bytes: Size = GIB
    encoding: str = "raw"
    write: str = "back"
    reader_count: int = 8
    writer_count: int = 2

    def __post_init__(self) -> None:
        _require(self.capacity_bytes >= 0, "tiers.nvme.capacity_bytes", self.capacity_bytes, "use 0 or more")
        _require(self.region_bytes >= MIB, "tiers.nvme.region_bytes", self.region_bytes, "use at least 1 MiB")
        _require(self.encoding in ("raw", "lz4"), "tiers.nvme.encoding", self.encoding, "use raw or lz4")
        _require(self.write in ("back", "through"), "tiers.nvme.write", self.write, "use back or through")
        for name in ("reader_count", "writer_count"):
            count = getattr(self, name)
            _require(1 <= count <= 64, f"tiers.nvme.{name}", count, "use 1..64")


@dataclass(frozen=True, kw_only=True)
class TierSettings:
    """The tiers below memory."""

    nvme: NvmeSettings

    @property
    def is_write_through(self) -> bool:
        """Whether a store is acknowledged only when a tier below memory has it."""
        return self.nvme.write == "through"


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """What one session, and all together, may hold."""

    session_count_max: int = 64
    connection_count_max: int = 128
    connection_idle_s_max: Duration = 300.0
    call_count_max: int = 512
    staging_bytes_max: Size = 512 * MIB
    staging_bytes_total_max: Size = 4 * GIB
    staging_count_max: int = 128
    staging_count_total_max: int = 384
    reservation_count_max: int = 256
    reservation_age_s_max: Duration = 60.0
    leased_bytes_max: Size
    lease_age_s_max: Duration = 60.0
    lease_count_max: int = 4096
    ticket_age_s_max: Duration = 30.0
    ticket_count_max: int = 4096
    ticket_bytes_max: Size = GIB
    stream_count_max: int = 64
    token_count_max: int = 1 << 20
    model_count_max: int = 256
    namespace_count_max: int = 16384
    watcher_count_max: int = 64
    watch_event_count_max: int = 16384
    pin_bytes_max: Size
    """Nothing can be pinned until pins have their RPC; configurations that set this go on being read."""
    message_bytes_max: Size = 16 * MIB

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            _require(value >= 0, f"limits.{name}", value, "use 0 or more")
        most = self.namespace_count_max
        _require(most <= 65536, "limits.namespace_count_max", most, "use at most 65536")
        for name in ("connection_count_max", "connection_idle_s_max", "call_count_max"):
            _require(getattr(self, name) >= 1, f"limits.{name}", getattr(self, name), "use 1 or more")
        _require(self.message_bytes_max >= 4096, "limits.message_bytes_max", self.message_bytes_max, "use >= 4 KiB")


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """What leaves first when room is needed; how long a store waits for the device to take what is in its way; how
    fast copies are read again (0: never), and how often a canary is sent (0: never)."""

    eviction: str = "lru"
    demotion_wait_s: Duration = 1.0
    scrub_bytes_per_s: Size = 16 * MIB
    canary_interval_s: Duration = 60.0

    def __post_init__(self) -> None:
        _require(self.eviction in POLICIES, "policy.eviction", self.eviction, f"use one of {', '.join(POLICIES)}")
        for name in ("demotion_wait_s", "scrub_bytes_per_s", "canary_interval_s"):
            _require(getattr(self, name) >= 0, f"policy.{name}", getattr(self, name), "use 0 or more")


@dataclass(frozen=True, kw_only=True)
class EventSettings:
    """Where chunks' comings and goings are published for routers, as vLLM publishes its blocks': ZMQ addresses such as
    "tcp://127.0.0.1:5557" or "ipc:///run/kvstore/events"; empty: not at all. What can be read there are digests."""

    endpoint: str = ""
    replay_endpoint: str = ""
    topic: str = "kv-events"
    buffer_count: int = 10_000
    allow_remote: bool = False

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            address = getattr(self, name)
            local = address.startswith(("tcp://127.0.0.1:", "tcp://[::1]:", "ipc://"))
            remedy = (
                "use tcp://127.0.0.1:PORT or ipc:///path; whoever reaches another address reads what is stored, so "
                "that takes events.allow_remote = true, too"
            )
            known = local or (self.allow_remote and address.startswith("tcp://"))
            _require(not address or known, f"events.{name}", address, remedy)
        needs = not self.replay_endpoint or bool(self.endpoint)
        _require(needs, "events.replay_endpoint", self.replay_endpoint, "set events.endpoint, too")
        _require(self.buffer_count >= 1, "events.buffer_count", self.buffer_count, "use 1 or more")


@dataclass(frozen=True, kw_only=True)
class RemoteSettings:
    """gRPC over TCP for clients on other hosts. Off while ``address`` (HOST:PORT) is empty; port 0 takes a free one.

    ``token_file``: one bearer token per line, or its ``sha256:<hex>``; ``#`` begins a comment. ``stall_s``: a reader
    or writer that moves no message for so long is let go.
    """

    address: str = ""
    token_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    client_ca_file: str = ""
    message_bytes: Size = 2 * MIB
    stream_count_max: int = 64
    stall_s: Duration = 10.0
    connection_count_max: int = 512
    call_count_max: int = 256

    def __post_init__(self) -> None:
        certificate, key, authority = self.certificate_file, self.key_file, self.client_ca_file
        if self.address:
            is_local = is_loopback(split_address(self.address, "remote.address")[0])
            remedy = (
                "it is no loopback address, so it needs TLS: set remote.certificate_file and remote.key_file, or "
                "listen on 127.0.0.1"
            )
            _require(is_local or bool(certificate and key), "remote.address", self.address, remedy)
        both = bool(certificate) == bool(key)
        _require(both, "remote.certificate_file", certificate, "set remote.key_file with it, or neither")
        has_own = bool(certificate) or not authority
        _require(has_own, "remote.client_ca_file", authority, "set remote.certificate_file and key_file too")
        fits = MIB <= self.message_bytes <= 4 * MIB
        _require(fits, "remote.message_bytes", self.message_bytes, "use 1 MiB to 4 MiB")
        for name in ("stream_count_max", "connection_count_max", "call_count_max"):
            _require(getattr(self, name) >= 1, f"remote.{name}", getattr(self, name), "use at least 1")
        _require(self.stall_s > 0, "remote.stall_s", self.stall_s, "use more than 0")


@dataclass(frozen=True, kw_only=True)
class ControllerSettings:
    """How long a call may wait, whatever deadline its caller names. Only settling, and
    waiting for a store in flight, may take longer."""

    deadline_s: Duration = 10.0

    def __post_init__(self) -> None:
        _require(self.deadline_s > 0, "controller.deadline_s", self.deadline_s, "use more than 0")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The whole tree. Only start-up sees it."""

    server: ServerSettings
    arena: ArenaSettings
    tiers: TierSettings
    limits: LimitSettings
    policy: PolicySettings = field(default_factory=PolicySettings)
    controller: ControllerSettings = field(default_factory=ControllerSettings)
    events: EventSettings = field(default_factory=EventSettings)
    remote: RemoteSettings = field(default_factory=RemoteSettings)
    tenants: Mapping[str, TenantSettings] = field(default_factory=dict)

    @property
    def tenant_names(self) -> list[str]:
        """The default tenant, which there always is, then the others."""
        return [DEFAULT_TENANT, *(name for name in self.tenants if name != DEFAULT_TENANT)]


def derived_defaults(environment: Mapping[str, str], memory_bytes: int) -> dict[str, dict[str, object]]:
    """Defaults that depend on the machine: directories, and an arena of min(25 % of memory, 4 GiB)."""
    home = Path(environment.get("HOME") or os.path.expanduser("~"))
    state_home = environment.get("XDG_STATE_HOME")
    state = (Path(state_home) if state_home else home / ".local" / "state") / "kvstore"
    capacity = min(memory_bytes // 4, 4 * GIB) // PAGE_BYTES * PAGE_BYTES
    return {
        "server": {"state_directory": state},
        "arena": {"capacity_bytes": max(capacity, 2 * PAGE_BYTES)},
    }


def dependent_defaults(
    environment: Mapping[str, str], state_directory: Path, capacity_bytes: int
) -> dict[str, dict[str, object]]:
    """Defaults that follow from other settings."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    sockets = Path(runtime) / "kvstore" if runtime else state_directory / "run"
    return {
        "server": {"socket_directory": sockets},
        "tiers.nvme": {"directory": state_directory / "nvme"},
        "limits": dict(arena_limits(capacity_bytes)),
    }


def arena_limits(capacity_bytes: int) -> dict[str, int]:
    """The limits that follow from an arena's size."""
    return {
        "leased_bytes_max": capacity_bytes,
        "pin_bytes_max": capacity_bytes // 2,
        "ticket_bytes_max": capacity_bytes // 2,
    }


def device_defaults(room_bytes: int, kept_bytes: int) -> dict[str, dict[str, object]]:
    """The device tier has the capacity that it had last; the first time it takes min(10 % of the room its directory's
    file system has for us, 16 GiB)."""
    first_bytes = min(room_bytes // 10, 16 * GIB) // PAGE_BYTES * PAGE_BYTES
    return {"tiers.nvme": {"capacity_bytes": kept_bytes or first_bytes}}
